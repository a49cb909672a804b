"""Run loglikelihood tasks of lm-evaluation-harness (pip install lm-eval) with each row split over the processes.

    torchrun --nproc-per-node 8 -m easy_context.evaluation.lm_eval_adapter --model MODEL --tasks lambada_openai

Nothing is truncated: a text that is longer than --max-length is an error. Tasks that generate text are refused, because
no rank holds a key-value cache of complete rows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM

from ..common.constants import IGNORE_INDEX
from ..common.flags import FlagParser, refusals, whole_number
from ..common.interrupts import end_on_signals
from .arguments import add_model_flags
from .loading import UnusableModel, distributed, load_model_config, load_scorer
from .memory_check import check_memory
from .scorer import Scorer


class TextTooLong(ValueError):
    """Raised for a text that is longer than --max-length; the message is for the user."""


class SplitRowsLM(TemplateLM):
    """A model that lm-evaluation-harness can ask for the likelihood of texts, on every process alike."""

    def __init__(self, scorer: Scorer, tokenizer: Any, longest: int) -> None:
        """Wrap a loaded model.

        Args:
            scorer: the model.
            tokenizer: its Hugging Face tokenizer.
            longest: maximum number of tokens in a text.

        Raises:
            ValueError: the tokenizer has no token with which a text can begin.
        """
        super().__init__()
        if tokenizer.eos_token_id is None and tokenizer.bos_token_id is None:
            raise ValueError("the tokenizer has neither a BOS nor an EOS token, one of which begins a text")
        self.scorer, self.tokenizer, self.longest = scorer, tokenizer, longest

    @property
    def eot_token_id(self) -> int:
        """The token after a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name, which lm-evaluation-harness stores with results."""
        return self.tokenizer.name_or_path

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a chat as text."""
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return a text's tokens; None adds the tokenizer's special tokens, unless the text begins with BOS."""
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = not (bos and string.startswith(bos))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def _loglikelihood_tokens(self, requests: list[tuple], **_: Any) -> list[tuple[float, bool]]:
        return self._of_each(requests, lambda request: self._score([*request[1], *request[2]], len(request[2])))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text."""
        texts = [[self.prefix_token_id, *self.tok_encode(request.args[0])] for request in requests]
        return self._of_each(texts, lambda ids: self._score(ids, len(ids) - 1)[0])

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Raise NotImplementedError: generating needs a key-value cache."""
        raise NotImplementedError("tasks that generate text need a key-value cache, which split rows do not have")

    def _of_each(self, requests: Sequence[Any], score: Callable[[Any], Any]) -> list[Any]:
        """Return the score of each request; each data-parallel group computes a share of them."""
        rank, groups = self.scorer.mesh.data_rank, self.scorer.mesh.data_size
        shares = self.scorer.from_every_group([score(request) for request in requests[rank::groups]])
        return [shares[number % groups][number // groups] for number in range(len(requests))]

    def _score(self, ids: list[int], count: int) -> tuple[float, bool]:
        """Return the log-likelihood of the last `count` tokens, and whether greedy decoding would write them."""
        if len(ids) > self.longest:
            raise TextTooLong(f"a text of {len(ids)} tokens is longer than --max-length {self.longest}: raise the flag")
        input_ids = torch.tensor([ids])
        targets = torch.full_like(input_ids, IGNORE_INDEX)
        targets[0, len(ids) - count - 1 : -1] = input_ids[0, len(ids) - count :]
        losses, predictions = self.scorer.losses_and_predictions(input_ids, targets)
        return -float(losses.double().sum()), bool((predictions == targets).all())


def main(arguments: list[str] | None = None) -> None:
    """Evaluate a model on tasks and print the table of results."""
    parser = FlagParser(prog="lm_eval_adapter", description="Run loglikelihood tasks of lm-evaluation-harness.")
    parser.add_argument("--model", required=True, help="path or hub name")
    parser.add_argument("--tasks", nargs="+", required=True, help="tasks of lm-evaluation-harness")
    parser.add_argument(
        "--max-length", type=whole_number(2), default=8192, help="most tokens of a text (default: %(default)s)"
    )
    parser.add_argument("--include-path", help="folder of further tasks of your own")
    parser.add_argument("--limit", type=whole_number(1), help="most examples of a task; default: all")
    add_model_flags(parser)
    args = parser.parse_args(arguments)
    with end_on_signals(lambda: "nothing was saved"):
        import lm_eval
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table

        from ..model.tokenizer import load_tokenizer

        with refusals("lm_eval_adapter"):
            config = load_model_config(args.model, args, args.max_length)
            check_memory(args.model, config, args, args.max_length, "--max-length")
            tokenizer = load_tokenizer(args.model)
        with (
            refusals("lm_eval_adapter", (UnusableModel, TextTooLong)),
            distributed() as device,
            load_scorer(args.model, config, args, device) as scorer,
        ):
            model = SplitRowsLM(scorer, tokenizer, args.max_length)
            tasks = TaskManager(include_path=args.include_path)
            results = lm_eval.simple_evaluate(model, tasks=args.tasks, limit=args.limit, task_manager=tasks)
        if results is not None:  # on the first process
            print(make_table(results))


if __name__ == "__main__":
    main()
