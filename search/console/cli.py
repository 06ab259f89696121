"""Give the commands their common parts: option groups, help by section, one-line errors.

Nothing heavy is imported here, so that `--help` answers at once.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from mola.settings import DTYPES
from search.console.terminal import drop_stdout, lasting_streams

SYSTEM_ERROR = 1
USAGE_ERROR = 2
LONGEST_ERROR = 2000  # characters; what was typed or read may be megabytes
LARGEST = 1_000_000_000
MOST_ROWS = 1_000_000  # of a step
MOST_WORKERS = 10_000
MOST_SEEDS = 1000
INTERRUPTED = 130

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


class UserError(click.ClickException):
    """A mistake of the person at the command line: one line, exit status 2."""

    exit_code = USAGE_ERROR


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn the libraries' ValueError, and trouble with files, into a one-line error."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UserError(one_line(error)) from error


def one_line(error: BaseException) -> str:
    """Say an exception in one line; its type where it has no words of its own."""
    return " ".join(str(error).split()) or type(error).__name__


def printable(text: str) -> str:
    """Write control characters, which would steer a terminal, as escapes; lines stay lines."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


class Option(click.Option):
    """An option that belongs to a section of the help."""

    def __init__(self, *args: Any, section: str = "Other", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class Command(click.Command):
    """A command whose help has sections and whose errors are one line on stderr."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, section by section, in the order of their declaration."""
        sections: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                sections[getattr(param, "section", "Other")].append(record)
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl(records)

    def main(self, args: Sequence[str] | None = None, *rest: Any, **kwargs: Any) -> NoReturn:
        """Run the command and leave: its status is the callback's int, 0 for None."""
        kwargs["standalone_mode"] = False
        with lasting_streams():
            try:
                status = super().main(args, *rest, **kwargs)
                if sys.stdout is not None:
                    sys.stdout.flush()
            except click.ClickException as error:
                message = printable(" ".join(error.format_message().split()))
                click.echo(f"Error: {message[:LONGEST_ERROR]}", err=True)
                sys.exit(error.exit_code)
            except click.Abort:
                sys.exit(INTERRUPTED)
            except OSError as error:  # of the machine, or of who reads our output
                if not isinstance(error, BrokenPipeError):
                    click.echo(f"Error: {one_line(error)}", err=True)
                drop_stdout()
                sys.exit(SYSTEM_ERROR)
        sys.exit(status if isinstance(status, int) else 0)


class CommaList(click.ParamType[tuple[Any, ...]]):
    """A list written with commas (`a,b`), or `none`; configuration files may use their own lists.

    Args:
        item: type of the items, int or str.
    """

    def __init__(self, item: type[int] | type[str]) -> None:
        self.item = item
        self.name = "n,n,..." if item is int else "name,name,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """Give a tuple; `none` and the empty list are the empty tuple."""
        if isinstance(value, str):
            text = value.strip()
            value = [] if text == "none" else [part.strip() for part in text.split(",")]
        elif any(type(part) is not self.item for part in value):
            items_are = "whole numbers" if self.item is int else "texts"
            self.fail(f"{value!r:.80} is not a list of {items_are}", param, ctx)
        try:
            items = tuple(self.item(part) for part in value)
        except ValueError:
            self.fail(f"{','.join(map(str, value))!r} is not a list of whole numbers", param, ctx)
        if "" in items:
            self.fail("an item of the list is empty", param, ctx)
        return items


def option(section: str, *names: str, **kwargs: Any) -> Callable[[CommandT], CommandT]:
    """Declare an option in a section of the help; its default is shown."""
    kwargs.setdefault("show_default", kwargs.get("default") is not None)
    return click.option(*names, cls=Option, section=section, **kwargs)


def group(*options: Callable[[Any], Any]) -> Callable[[CommandT], CommandT]:
    """Join options into one decorator that keeps their order."""

    def decorate(command: CommandT) -> CommandT:
        for each in reversed(options):
            command = each(command)
        return command

    return decorate


class Whole(click.IntRange):
    """An integer in a range, called so in messages and help.

    Args:
        min: the smallest one.
        max: the largest one, so that a slip of the finger does not fill the memory.
    """

    name = "integer"

    def __init__(self, min: int, max: int = LARGEST) -> None:  # noqa: A002 - click's names
        super().__init__(min, max)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Give an int; click cannot write one of thousands of digits, which a file may hold."""
        if isinstance(value, int) and value.bit_length() > 1000:
            self.fail(f"a number of {value.bit_length()} bits is out of range.", param, ctx)
        number: int = super().convert(value, param, ctx)
        return number

    def _describe_range(self) -> str:
        return super()._describe_range() if self.max != LARGEST else f"x>={self.min}"


class Number(click.FloatRange):
    """A finite number in a range, called so in messages and help."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Give a float; NaN compares with nothing, so that a range alone lets it pass."""
        try:
            number: float = super().convert(value, param, ctx)
        except OverflowError:  # an integer of a file, beyond all floats
            number = math.inf
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


positive = Whole(min=1)
first_seed = Whole(min=0, max=2**31 - 1 - MOST_SEEDS)  # what every generator of numbers takes
rate = Number(min=0, min_open=True)

model_options = group(
    option(
        "Model",
        "--model",
        metavar="ID|DIR",
        help="Frozen base model: a Hugging Face id or a local folder.  "
        "[default: the built-in demonstration model]",
    ),
    option("Model", "--revision", help="Branch, tag or commit of a model on the hub."),
    option(
        "Model",
        "--dtype",
        type=click.Choice(DTYPES),
        default="auto",
        help="Dtype of the frozen weights; auto: bfloat16 on GPUs that have it, else float32.",
    ),
    option(
        "Model",
        "--trust-remote-code",
        is_flag=True,
        help="Let code that comes with the model run on this machine.",
    ),
)

data_options = group(
    option(
        "Data",
        "--data",
        metavar="DIR|ID",
        help="Folder with train, validation and maybe test files (JSON Lines, JSON, CSV, "
        "Parquet), a folder saved by datasets, or a hub id.  [default: the built-in task]",
    ),
    option(
        "Data",
        "--prompt-template",
        metavar="TEXT|chat",
        help="Text with {instruction} and {input}; chat: the tokenizer's chat template.  "
        "[default: Alpaca's without input]",
    ),
    option(
        "Data",
        "--max-length",
        type=positive,
        default=256,
        help="Longest row in tokens; longer prompts are cut, answers never.",
    ),
    option(
        "Data",
        "--validation-rows",
        type=positive,
        default=300,
        help="Most rows of the validation split that are evaluated.",
    ),
)

adapter_options = group(
    option(
        "Adapter",
        "--target-modules",
        type=CommaList(str),
        help="Suffixes of the adapted modules.  [default: all linear layers of the blocks]",
    ),
    option("Adapter", "--r", type=positive, default=8, help="Rank of each expert."),
    option(
        "Adapter",
        "--lora-alpha",
        type=rate,
        default=16.0,
        help="An adapter's output is scaled by lora-alpha / r.",
    ),
    option(
        "Adapter",
        "--lora-dropout",
        type=Number(0, 1, max_open=True),
        default=0.05,
        help="Probability with which an expert's input is dropped.",
    ),
    option("Adapter", "--top-k", type=positive, default=2, help="Experts that a token is sent to."),
    option(
        "Adapter",
        "--router-aux-loss-coef",
        type=Number(min=0),
        default=0.0,
        help="Weight of the balance loss; 0: off.",
    ),
)

training_options = group(
    option(
        "Training",
        "--batch-size",
        type=Whole(1, MOST_ROWS),
        default=8,
        help="Rows per optimizer step.",
    ),
    option(
        "Training",
        "--micro-batch",
        type=positive,
        help="Rows per forward pass, to save memory; gradients add up.  [default: batch-size]",
    ),
    option(
        "Training",
        "--learning-rate",
        type=rate,
        default=1e-3,
        help="Peak of a linear warm-up and decay.",
    ),
    option(
        "Training",
        "--gradient-checkpointing",
        is_flag=True,
        help="Compute activations twice to save memory.",
    ),
)

study_options = group(
    option(
        "Study",
        "--root",
        type=click.Path(path_type=Path, file_okay=False),
        default=Path("runs"),
        help="Folder of the studies.",
    ),
    option(
        "Study",
        "--storage",
        metavar="URL",
        help="Optuna storage.  [default: SQLite in ROOT/STUDY/study.db]",
    ),
)
