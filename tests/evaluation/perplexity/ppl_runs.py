"""Documents and losses for tests of perplexity."""

import csv
import json

import torch
import torch.nn.functional as F
from tiny_models import VOCABULARY, tiny_llama

import eval_ppl
from easy_context.evaluation.perplexity.documents import Document

RELATIVE = 1e-5  # fp32 losses of the same tokens by another order of sums


def random_ids(length, seed=0):
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


def document(ids, labels=None):
    return Document("d", ids, ids if labels is None else labels, "--text d")


def plain_losses(ids):
    """Loss of every token but the first, from whole logits of a plain Hugging Face forward."""
    logits = tiny_llama()(ids[None]).logits[0].double()
    return F.cross_entropy(logits[:-1], ids[1:], reduction="none")


def run(arguments, output):
    """Run eval_ppl.py; return the rows of its CSV and its summary."""
    eval_ppl.main([*arguments, "--output-file", str(output)])
    return read(output)


def read(output):
    with open(output, newline="") as file:
        return list(csv.DictReader(file)), json.loads(output.with_suffix(".json").read_text())
