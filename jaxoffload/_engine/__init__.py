"""Behind scan, chain and checkpoint: from a traced function and a policy to loops that copy while they compute."""
