"""The evaluation's model: as many logits as it says, and the values of the plain model. (On several processes:
test_evaluation_models.py.)"""

import pytest
import torch
import torch.nn.functional as F
from family_models import patched
from tensor_sizes import LargestTensor
from tiny_models import tiny_llama

from easy_context.evaluation.scorer import Scorer
from easy_context.loss import IGNORE_INDEX, next_token_targets
from easy_context.mesh import Mesh

VOCABULARY, LENGTH = 1000, 400


@pytest.fixture(scope="module")
def model():
    return tiny_llama(vocab_size=VOCABULARY, attn_implementation="sdpa")


@pytest.fixture
def row():
    ids = torch.randint(0, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    return ids, next_token_targets(ids)


@pytest.mark.parametrize("chunk", [100, 60])
def test_losses_are_made_from_so_many_logits_at_a_time(model, row, chunk):
    ids, targets = row
    with LargestTensor() as seen:
        losses = Scorer(model, None, Mesh(), torch.device("cpu"), loss_chunk=chunk).token_losses(ids, targets)
    assert seen.largest == chunk * VOCABULARY
    with torch.no_grad():
        expected = F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
    torch.testing.assert_close(losses[0, :-1], expected, rtol=1e-4, atol=1e-5)
    assert losses[0, -1] == 0 and not losses.requires_grad


def test_predictions_need_the_logits_of_their_own_positions_only(model, row):
    ids, targets = row
    wanted = [5, 17, 300]
    few = torch.full_like(targets, IGNORE_INDEX)
    few[0, wanted] = targets[0, wanted]
    with LargestTensor() as seen:
        predicted = Scorer(model, None, Mesh(), torch.device("cpu")).predictions(ids, few)
    assert seen.largest < 100 * VOCABULARY
    with torch.no_grad():
        expected = model(ids).logits.argmax(dim=-1)
    assert torch.equal(predicted[0, wanted], expected[0, wanted])
    assert (predicted != IGNORE_INDEX).sum() == len(wanted)
    nothing = Scorer(model, None, Mesh(), torch.device("cpu")).predictions(ids, torch.full_like(ids, IGNORE_INDEX))
    assert (nothing == IGNORE_INDEX).all()


@pytest.mark.parametrize("batch", [1, 3])
def test_layers_run_by_tiles_under_a_mode(row, batch):
    """No tensor of the MLP, the only one 2,000 wide, is of more tokens than a tile."""
    wide = tiny_llama(vocab_size=VOCABULARY, intermediate_size=2000)
    ids, targets = (x.expand(batch, -1) for x in row)
    losses = {}
    with patched("data_parallel", attn_kernel="cpu") as mesh:
        for tile, largest in ((0, batch * LENGTH * 2000), (60, 60 * 2000)):
            scorer = Scorer(wide, "data_parallel", mesh, torch.device("cpu"), loss_chunk=10, tile_size=tile)
            with LargestTensor() as seen:
                losses[tile] = scorer.token_losses(ids, targets)
            assert seen.largest == largest
    torch.testing.assert_close(losses[60], losses[0], rtol=1e-5, atol=1e-5)


def test_one_process_is_the_first_rank_and_its_own_group():
    scorer = Scorer(torch.nn.Identity(), None, Mesh(), torch.device("cpu"))
    assert scorer.is_first_rank and scorer.from_first_rank("x") == "x" and scorer.from_every_group("x") == ["x"]
    places = [(data, sequence) for data in range(2) for sequence in range(2)]
    meshes = [Mesh(sequence_rank=sequence, sequence_size=2, data_rank=data, data_size=2) for data, sequence in places]
    writers = [Scorer(torch.nn.Identity(), None, mesh, torch.device("cpu")).is_first_rank for mesh in meshes]
    assert writers == [True, False, False, False]
