"""tools/mutate.py knows the files that there are."""

import sys

import pytest
from launching import REPOSITORY

sys.path.append(str(REPOSITORY / "tools"))
import mutate


@pytest.mark.parametrize("module", mutate.TESTS)
def test_modules_and_their_tests_exist(module):
    assert (REPOSITORY / module).is_file()
    for name in mutate.TESTS[module].split():
        assert len(list(REPOSITORY.glob(f"tests/**/test_{name}.py"))) == 1, name


def test_every_mutant_is_another_program():
    """Each parses and differs from the module; faults of several kinds are found in one module."""
    mutants = mutate.mutants_of("easy_context/loss.py")
    source = (REPOSITORY / "easy_context/loss.py").read_bytes()
    for mutant in mutants:
        changed = source[: mutant["start"]] + mutant["after"].encode() + source[mutant["end"] :]
        assert changed != source
        compile(changed, "loss.py", "exec")
    assert len({mutant["kind"] for mutant in mutants}) > 5
