"""Feed damaged input to everything that reads any: `python -m benchmarks.fuzz --seconds 60`.

Each case takes a valid input, damages it (bytes, or the values of its JSON), and gives it to a
reader. The reader may accept it, or refuse it by a ValueError of one line; whatever else it raises
is printed with the target and the seed of the case, which repeat it: `--target rows --seed 17`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import shutil
import sqlite3
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path

import click
import optuna
import torch
import yaml
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.damage import ODD, damaged, torn
from mola.allocation import Allocation, ExpertBudget
from mola.base import load_config, load_model, load_tokenizer
from mola.config import MolaConfig
from mola.data import encode_splits
from mola.events import Finished
from mola.model import detach, get_mola_model, load_mola_model
from mola.rows import load_splits
from mola.settings import AdapterSettings, ModelSource, TrainSettings
from mola.upstream import convert
from search import config, run
from search.bounds import make_budget
from search.conclude import conclude
from search.priors.given import read_priors
from search.report.findings import read_findings
from search.status import describe
from studies.allocation_file import Origin
from studies.encoding import distributions
from studies.export import allocation_document, read_allocation_file
from studies.provenance import note_run
from studies.spec import StudySpec
from studies.storage import sqlite_url
from studies.store import (
    complete,
    enqueue,
    load_study,
    open_study,
    records,
    set_conclusion,
    set_priors,
)

LAYERS = 4


class Targets:
    """The readers, each with a valid input to begin from.

    Args:
        folder: For files; every case has one of its own in it.
        model: A small model, which adapters are attached to and taken off again.
        model_dir: Where it was loaded from.
    """

    def __init__(self, folder: Path, model: PreTrainedModel, model_dir: Path) -> None:
        self._folder = folder
        self._model = model
        self._tokenizer = load_tokenizer(ModelSource(str(model_dir)))
        self._adapter, self._upstream = folder / "adapter", folder / "upstream"
        mola_config = MolaConfig(experts=(1, 2, 3, 2), r=2, target_modules=["q_proj"])
        fresh = get_mola_model(model, mola_config, seed=0)
        fresh.save_pretrained(self._adapter)
        detach(fresh)
        convert(self._adapter, self._upstream)
        self._store = folder / "study.db"
        _make_study(self._store)
        self.all: dict[str, Callable[[random.Random, Path], object]] = {
            "adapter": self.adapter,
            "allocation": self.allocation,
            "allocation text": self.allocation_text,
            "command line": self.command_line,
            "config": self.config,
            "prior": self.prior,
            "rows": self.rows,
            "spec": self.spec,
            "store": self.store,
            "upstream": self.upstream,
        }

    def case(self, target: str, seed: int) -> str:
        """Run one case.

        Returns:
            "accepted", or the one line of the refusal.

        Raises:
            Exception: What the reader should not have raised.
        """
        rng = random.Random(f"{target} {seed}")  # noqa: S311
        with tempfile.TemporaryDirectory(dir=self._folder) as scratch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self.all[target](rng, Path(scratch))
            except (ValueError, click.ClickException) as error:
                line = error.format_message() if isinstance(error, click.ClickException) else error
                if "\n" in str(line).strip() and not isinstance(error, click.ClickException):
                    raise AssertionError(f"more than one line: {line!s:.200}") from error
                return str(line)
        return "accepted"

    def rows(self, rng: random.Random, folder: Path) -> None:
        """Read damaged rows in all formats, and encode them."""
        row = {"instruction": "a?", "input": "b", "output": "c", "choices": ["c", "d"]}
        rows = [{**row, "instruction": f"{i}"} for i in range(4)]
        lines = "".join(json.dumps(r) + "\n" for r in rows)
        (folder / "validation.jsonl").write_text(lines, "utf-8")
        suffix = rng.choice([".jsonl", ".json", ".csv"])
        if suffix == ".csv":
            text = "instruction,output,choices\n" + 'a,c,"[""c"", ""d""]"\n' * 3
        elif rng.random() < 0.5:
            text = json.dumps(damaged(rows, rng))
        else:
            text = "".join(json.dumps(damaged(r, rng)) + "\n" for r in rows)
        data = text.encode()
        (folder / f"train{suffix}").write_bytes(torn(data, rng) if rng.random() < 0.6 else data)
        splits = load_splits(str(folder))
        encode_splits(splits, self._tokenizer, prompt_template=None, max_length=300, name="rows")

    def allocation(self, rng: random.Random, folder: Path) -> None:
        """Read a damaged allocation.json."""
        data = json.dumps(damaged(_ALLOCATION, rng)).encode()
        (folder / "a.json").write_bytes(torn(data, rng) if rng.random() < 0.4 else data)
        read_allocation_file(folder / "a.json")

    def allocation_text(self, rng: random.Random, folder: Path) -> None:
        """Read an allocation, and bounds, from odd text."""
        words = ["2x8", "4", ",", " ", "[", "]", "x", "-1", "1e9", "9" * 30, "0x0", "٣", "\n", "2x"]
        text = "".join(rng.choices(words, k=rng.randint(0, 6)))
        counts = Allocation.parse(text).experts
        make_budget(len(counts), rng.choice([0, 5, 10**6, 10**18]), 0, counts, ((0, 1),))

    def spec(self, rng: random.Random, folder: Path) -> None:
        """Read a damaged record of what a study searches."""
        text = json.dumps(damaged(json.loads(_SPEC.to_json()), rng))
        StudySpec.from_json(torn(text.encode(), rng).decode("utf-8", "replace"))
        StudySpec.from_json(text)

    def config(self, rng: random.Random, folder: Path) -> None:
        """Read a damaged file of settings."""
        settings = {"budget": 160, "steps": 4, "rungs": [1, 2], "model": "m", "learning-rate": 0.1}
        suffix = rng.choice([".yaml", ".toml", ".yml", ".txt"])
        if suffix == ".toml":
            text = "\n".join(f"{k} = {json.dumps(v)}" for k, v in damaged(settings, rng).items())
        else:
            text = yaml.safe_dump(damaged(settings, rng))
        data = text.encode("utf-8", "replace")
        path = folder / f"c{suffix}"
        path.write_bytes(torn(data, rng) if rng.random() < 0.5 else data)
        found = config.check(config.read(path), run.main, path)
        with _quiet_exit():
            run.main.make_context("run", ["--budget", "8"], default_map=found)

    def prior(self, rng: random.Random, folder: Path) -> None:
        """Read a damaged file of scores or an allocation."""
        valid = rng.choice([{"scores": [1, 2.5, 0, 3]}, [1, 2, 3, 2], _ALLOCATION])
        data = json.dumps(damaged(valid, rng)).encode()
        (folder / "p.json").write_bytes(torn(data, rng) if rng.random() < 0.4 else data)
        read_priors((str(folder / "p.json"),), ExpertBudget(LAYERS, 8))

    def command_line(self, rng: random.Random, folder: Path) -> None:
        """Parse a line of known options with odd values."""
        options = [o for p in run.main.params for o in p.opts if o.startswith("--")]
        words = ["--budget", "8"]
        for _ in range(rng.randint(1, 5)):
            words += [rng.choice(options), str(rng.choice(ODD[:14]))]
        with _quiet_exit():
            run.main.make_context("run", [w.replace("\0", "?")[:200] for w in words])

    def store(self, rng: random.Random, folder: Path) -> None:
        """Read a study whose attributes another program wrote, or whose file is damaged."""
        path = folder / "study.db"
        data = self._store.read_bytes()
        path.write_bytes(torn(data, rng) if rng.random() < 0.2 else data)
        if path.read_bytes() == data:
            with closing(sqlite3.connect(path)) as database:
                for _ in range(rng.randint(1, 3)):
                    _damage_row(database, rng)
                database.commit()
        study = load_study("s", sqlite_url(path))
        describe(read_findings(study), datetime(2026, 1, 1))
        allocation_document(study, 0)

    def adapter(self, rng: random.Random, folder: Path) -> None:
        """Attach a damaged adapter."""
        source = folder / "adapter"
        shutil.copytree(self._adapter, source)
        _damage_files(source, rng)
        detach(load_mola_model(self._model, source))

    def upstream(self, rng: random.Random, folder: Path) -> None:
        """Convert a damaged adapter of the reference implementation, or one of ours."""
        source = folder / "theirs"
        shutil.copytree(rng.choice([self._upstream, self._adapter]), source)
        _damage_files(source, rng)
        convert(source, folder / "out", top_k=rng.choice([2, 2, 0, -1, 10**9]))


def _make_study(path: Path) -> None:
    """Make a study of one complete trial, with a conclusion."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = open_study(
        "s",
        sqlite_url(path),
        _SPEC,
        sampler=optuna.samplers.RandomSampler(),
        pruner=optuna.pruners.NopPruner(),
    )
    enqueue(study, Allocation([2] * LAYERS), label="named 5555", seed=0)
    trial = study.ask(distributions(_SPEC.budget))
    complete(study, trial, Finished(4, 1.0, 0.5, 0.1, 1.0, 1.0))
    set_conclusion(study, conclude(records(study), _SPEC, confirm_seeds=0))
    set_priors(study, {"p": {"experts": [2] * LAYERS, "scores": None}})
    note_run(study, "python", train_rows=1, validation_rows=1, goal=1, replicates=0)


def _damage_row(database: sqlite3.Connection, rng: random.Random) -> None:
    """Damage an attribute of the study or of its trial, inside JSON that is kept as text, too."""
    table = rng.choice(["study_user_attributes", "trial_user_attributes"])
    rows = database.execute(f"SELECT rowid, value_json FROM {table} ORDER BY rowid").fetchall()  # noqa: S608
    place, text = rng.choice(rows)
    value = json.loads(text)
    try:
        inner = json.loads(value)
        value = json.dumps(damaged(inner, rng))
    except (TypeError, ValueError):
        value = damaged([value], rng)[:1] or None
        value = value[0] if value else None
    update = f"UPDATE {table} SET value_json = ? WHERE rowid = ?"  # noqa: S608
    database.execute(update, (json.dumps(value), place))


def _damage_files(folder: Path, rng: random.Random) -> None:
    """Damage the configuration by value, or a file by bytes, or a tensor's name and shape."""
    path = folder / "adapter_config.json"
    action = rng.randrange(4)
    if action < 2:
        path.write_text(json.dumps(damaged(json.loads(path.read_text()), rng)))
    elif action == 2:
        victim = rng.choice(sorted(folder.glob("adapter_*")))
        victim.write_bytes(torn(victim.read_bytes(), rng))
    else:
        _damage_weights(folder, rng)


def _damage_weights(folder: Path, rng: random.Random) -> None:
    from safetensors.torch import load_file, save_file

    ours, theirs = folder / "adapter_model.safetensors", folder / "adapter_model.bin"
    weights = load_file(ours) if ours.exists() else torch.load(theirs, weights_only=True)
    key = rng.choice(sorted(weights))
    value = weights.pop(key)
    names = [key, key.replace("0", "99999999999"), "x", key.replace("self_attn", "0"), key + ".0"]
    shapes = [value, value[:1], value.T.contiguous(), value.int(), value * float("nan")]
    shapes += [torch.zeros(()), value.flatten(), value.to(torch.complex64)]
    weights[rng.choice(names)] = rng.choice(shapes).clone().contiguous()
    save_file(weights, ours) if ours.exists() else torch.save(weights, theirs)


@contextmanager
def _quiet_exit() -> Iterator[None]:
    """Let `--help`, which leaves at once, be an accepted line."""
    try:
        yield
    except click.exceptions.Exit:
        return


_ORIGIN = Origin(
    name="s",
    trial=1,
    objective="nats per row",
    objective_mean=1.0,
    objective_standard_error=None,
    seeds=1,
    accuracy=0.5,
    difference_to_uniform=None,
    model=ModelSource(),
    model_fingerprint="m",
    data="d",
    data_fingerprint="d",
    prompt_template=None,
    max_length=64,
    train=TrainSettings(),
    seed=0,
)

_SPEC = StudySpec(
    num_layers=LAYERS,
    total=8,
    low=1,
    high=4,
    model=ModelSource(),
    model_fingerprint="m",
    data="d",
    data_fingerprint="d",
    prompt_template=None,
    max_length=64,
    adapter=AdapterSettings(),
    train=TrainSettings(),
    rungs=(),
    seed=0,
    objective="nats per row",
)
_ALLOCATION = {
    **{name: getattr(_SPEC.adapter, name) for name in AdapterSettings.__dataclass_fields__},
    "format_version": 1,
    "base_model": "m",
    "num_layers": LAYERS,
    "total_experts": 8,
    "experts_per_layer": [2] * LAYERS,
    "study": dataclasses.asdict(_ORIGIN),
    "versions": {},
    "upstream_args": None,
}


def small_model(folder: Path) -> PreTrainedModel:
    """Make a random Llama of 4 layers, with the built-in model's tokenizer."""
    source = ModelSource()
    load_tokenizer(source).save_pretrained(folder)
    config = load_config(source)
    config.update({"num_hidden_layers": LAYERS, "hidden_size": 16, "intermediate_size": 32})
    config.update({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return load_model(ModelSource(str(folder)))


def main() -> int:
    """Run cases until the time is up, or the one that is asked for.

    Returns:
        The exit status, 1 if anything went wrong.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="wall clock (default 60)")
    parser.add_argument("--target", help="one reader alone (default: all in turn)")
    parser.add_argument("--seed", type=int, default=0, help="of the first case (default 0)")
    parser.add_argument("--cases", type=int, help="stop after so many of each")
    options = parser.parse_args()
    torch.set_num_threads(1)
    failures = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        targets = Targets(folder, small_model(folder / "model"), folder / "model")
        names = [options.target] if options.target else list(targets.all)
        done: Counter[tuple[str, bool]] = Counter()
        end, seed = time.monotonic() + options.seconds, options.seed
        while time.monotonic() < end and seed - options.seed != options.cases:
            for name in names:
                try:
                    done[name, targets.case(name, seed) == "accepted"] += 1
                except Exception:
                    failures += 1
                    print(f"--target {name!r} --seed {seed}")
                    traceback.print_exc(limit=-4, file=sys.stdout)
            seed += 1
        for name in names:
            print(f"{name:16} {done[name, True]:6} accepted {done[name, False]:6} refused")
    print(f"{failures} wrong")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
