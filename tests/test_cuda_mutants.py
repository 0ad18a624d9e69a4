"""The planted bugs of tests/cuda_emulator/mutants still fit the kernels; mutate.py runs them."""

import pytest
from cuda_emulator import build, mutate


@pytest.mark.parametrize("mutant", mutate.mutants(), ids=lambda mutant: mutant.name)
def test_fits_the_kernels(mutant: mutate.Mutant) -> None:
    text = (build.ROOT / mutant.file).read_text()
    assert mutate.mutated(text, mutant) != text
    with pytest.raises(ValueError, match="occurs 2 times"):
        mutate.mutated(text + text, mutant)
    with pytest.raises(ValueError, match="occurs 0 times"):
        mutate.mutated("", mutant)


def test_every_class_has_one() -> None:
    assert {mutant.bug_class for mutant in mutate.mutants()} == mutate.CLASSES
    assert {mutant.layer for mutant in mutate.mutants() if mutant.name in mutate.FEW} == {
        "plain",
        "asan",
        "tsan",
    }
