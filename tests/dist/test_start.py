"""How a run of several processes starts: the first one decides for all, and all see one folder."""

import dataclasses
import os

import pytest
from dist_workers import Crew
from tiny_run import tiny_recipe, write_tiny_data

from openk3.config.recipe import ParallelRecipe
from openk3.errors import OpenK3Error

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_tiny_data(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture(scope="module")
def pair():
    crew = Crew(2)
    yield crew
    crew.close()


def start(world, attempt, recipes, folders, resume, blind=False):
    """Train with this process's recipe and folder; what it refused, or the step it came to."""
    from openk3.train import begin, setup

    os.environ["TORCHELASTIC_RESTART_COUNT"] = attempt
    begin.PATIENCE_S = 0.5
    wait = setup.wait_for_folder
    if blind:
        setup.wait_for_folder = lambda folder, run_id: None
    try:
        with setup.training(recipes[world.rank], folders[world.rank], world, resume=resume) as t:
            t.fit()
            return t.progress.step
    except OpenK3Error as error:
        return f"{type(error).__name__}: {error}"
    finally:
        setup.wait_for_folder = wait


def test_what_the_first_process_refuses_all_refuse(pair, data, tmp_path):
    recipe = tiny_recipe(data, train__steps=2)
    both, folder = [recipe] * 2, [tmp_path / "r"] * 2
    assert pair.run(start, "refuse-1", both, folder, False) == [2, 2]
    again = pair.run(start, "refuse-2", both, folder, False)
    assert again[0] == again[1]
    assert "already holds a run: pass --resume auto" in again[0]
    longer = tiny_recipe(data, train__steps=3)
    other = pair.run(start, "refuse-3", [longer] * 2, folder, True)
    assert other[0] == other[1]
    assert "train.steps is 2 there, 3 here" in other[0]


def test_without_zero_only_the_first_process_needs_the_folder(pair, data, tmp_path):
    recipe, folders = tiny_recipe(data, train__steps=4), [tmp_path / "a", tmp_path / "b"]
    stopped = dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, stop_after=2))
    assert pair.run(start, "own-1", [stopped] * 2, folders, False) == [2, 2]
    assert pair.run(start, "own-2", [recipe] * 2, folders, True) == [4, 4]
    assert not folders[1].exists()


def test_processes_of_zero_that_see_different_folders_are_refused(data, tmp_path):
    recipe, folders = tiny_recipe(data, train__steps=4), [tmp_path / "a", tmp_path / "b"]
    recipe = dataclasses.replace(recipe, parallel=ParallelRecipe(zero=1))
    with pytest.raises(AssertionError, match=r"StorageError: .*/b is not the folder here that"):
        Crew(2).run(tell, "see", [recipe] * 2, folders, False)


def tell(world, *args):
    """`start`, whose refusal is shown by whoever waits for it."""
    answer = start(world, *args)
    assert isinstance(answer, int), answer
    return answer


def test_a_checkpoint_that_lacks_what_a_process_wrote_is_none(pair, data, tmp_path):
    recipe, folders = tiny_recipe(data, train__steps=2), [tmp_path / "a", tmp_path / "b"]
    recipe = dataclasses.replace(recipe, parallel=ParallelRecipe(zero=1))
    found = pair.run(start, "lack", [recipe] * 2, folders, False, True)
    for answer in found:
        assert "__1_0.distcp has not come here; all processes must see one file system" in answer
        assert answer.startswith("StorageError: cannot write ")
    assert not [p for p in (tmp_path / "a/checkpoints").iterdir() if p.name.startswith("step_")]


def test_processes_started_otherwise_are_named(data, tmp_path):
    one = tiny_recipe(data)
    odd = dataclasses.replace(one.run, eval_every=3, threads=2)
    two = dataclasses.replace(one, parallel=ParallelRecipe(zero=1), run=odd)
    with pytest.raises(AssertionError) as caught:
        Crew(2).run(tell, "other", [one, two], [tmp_path / "r"] * 2, False)
    assert (
        "rank 1 was started otherwise than rank 0: parallel.zero is 0 there, 1 here; "
        "run.eval_every is 4 there, 3 here\n"
    ) in str(caught.value)
    assert not (tmp_path / "r").exists()
