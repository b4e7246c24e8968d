"""A sample of tests/mutations.py: kernels broken in one place are found out. The whole of it, by
hand, takes an hour.
"""

import random
import sys
from pathlib import Path

import pytest

from jitmoe.emulate.compile import NoHostCompiler, compiler

sys.path.insert(0, str(Path(__file__).parents[1]))
import mutations

try:
    compiler()
except NoHostCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

MUTANTS = {mutant.name: mutant for mutant in mutations.all_mutants()}
SURVIVORS = mutations.EQUIVALENT | mutations.UNSEEN
SAMPLE = random.Random(1).sample(sorted(MUTANTS.keys() - SURVIVORS.keys()), 10)


def test_the_survivors_exist():
    assert SURVIVORS.keys() <= MUTANTS.keys()


def test_every_role_is_mutated():
    files = {mutant.file for mutant in MUTANTS.values()}
    roles = Path(mutations.__file__).parents[1] / "templates" / "roles"
    missing = {f"roles/{path.name}" for path in roles.iterdir()} - files
    assert missing == {"roles/no_exchange.cuh", "roles/one_domain.cuh"}, "which do nothing"
    assert len(MUTANTS) > 120


@pytest.mark.parametrize("name", SAMPLE)
def test_mutant_is_killed(name):
    assert mutations.kill(MUTANTS[name]), "the emulator found nothing wrong"
