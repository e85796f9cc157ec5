"""pytest's part of `make claims`: marks the claims' tests, and says of each claim at the end how they went.

`-m claim` chooses these tests, `--claims` prints the table.
"""

import pytest

from benchmarks import claims
from benchmarks.judge import FAILS, HOLDS, NOT_RUN, worst

VERDICTS = {"passed": HOLDS, "skipped": NOT_RUN, "xfailed": NOT_RUN, "xpassed": FAILS, "failed": FAILS, "error": FAILS}


def pytest_addoption(parser):
    parser.addoption("--claims", action="store_true", help="at the end, say which of the README's claims hold")


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(items):
    tests = [test for claim in claims.read().claims.values() for test in claim.tests]
    for item in items:
        if any(is_of(item.nodeid, test) for test in tests):
            item.add_marker("claim")


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    if config.option.claims:
        # In a run that was stopped, or is of chosen tests, a function's parameters need not all have run.
        chosen = any(getattr(config.option, how, None) for how in ("keyword", "maxfail", "deselect", "lf", "stepwise"))
        chosen = chosen or any("[" in arg for arg in config.args)
        whole = not chosen and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        terminalreporter.section("claims of README.md")
        terminalreporter.write_line(table(claims.read(), verdicts(terminalreporter.stats), whole))


def is_of(node, test):
    """Whether pytest's node is the test, one of its parameters, or in the file that it is."""
    return node == test or node.startswith((f"{test}[", f"{test}::"))


def verdicts(stats):
    """Node -> what its run says; nothing of those that only a GPU runs, which have a measurement."""
    found = {}
    for outcome, verdict in VERDICTS.items():
        for report in stats.get(outcome, ()):
            if not (outcome == "skipped" and "gpu" in report.keywords):
                found[report.nodeid] = worst({verdict, found.get(report.nodeid, verdict)})
    return found


def table(listed, nodes, whole=True):
    """All claims: what their tests say, in this run, and what their measurements said."""
    rows = []
    for name, claim in listed.claims.items():
        each = {test: worst(verdict for node, verdict in nodes.items() if is_of(node, test)) for test in claim.tests}
        if claim.tests:
            verdict = worst(each.values())
            first, *others = (test for test in each if each[test] == verdict)
            check = first + (f" and {len(others)} more" if others else "")
            rows.append((name, NOT_RUN if verdict == HOLDS and not whole else verdict, check))
    return claims.table(rows) + "\n\nmeasured on GPUs:\n" + claims.table(claims.recorded(listed))
