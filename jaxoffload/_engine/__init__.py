"""Behind scan, chain, checkpoint and accumulate: from a traced function and a policy to loops that copy meanwhile."""
