"""Commands that can be pasted, and tell no secret."""

from __future__ import annotations

import shlex
from dataclasses import fields
from pathlib import Path

from search.console.command_line import given_options, module_command, study_place
from search.plan import Settings
from search.run import main

SETTINGS = {field.name: None for field in fields(Settings)}


def test_what_was_given_is_written_as_flags() -> None:
    settings = {
        **SETTINGS,
        "budget": 160,
        "learning_rate": 0.00012345678,
        "target_modules": ("q_proj", "v_proj"),
        "rungs": (),
        "quiet": True,
        "gradient_checkpointing": False,
        "root": Path("my runs"),
        "steps": 40,
    }
    given = [name for name in settings if name != "steps"]
    words = given_options(main, settings, given)
    command = module_command("run", *words)
    assert shlex.split(command)[:3] == ["python", "-m", "search.run"]
    pairs = " ".join(words)
    assert "--budget 160" in pairs
    assert "--learning-rate 0.00012345678" in pairs
    assert "--target-modules q_proj,v_proj" in pairs
    assert "--rungs none" in pairs
    assert "--quiet" in words
    assert "'my runs'" in command
    assert not {"--steps", "--gradient-checkpointing", "--model"} & set(words)


def test_flags_that_are_written_are_read_again_as_the_same_settings() -> None:
    given = {
        "budget": 160,
        "rungs": (5, 10),
        "lora_alpha": 16.5,
        "fix": ((0, 2), (31, 8)),
        "min_experts": (0, 1, 1, 0),
        "prior": ("2468", "my prior.txt"),
        "warm_from": ("other", "third"),
    }
    words = given_options(main, {**SETTINGS, **given}, list(given))
    params = main.make_context("run", list(words)).params
    assert {name: params[name] for name in given} == given
    words = given_options(main, {**SETTINGS, "budget": (96, 160)}, ["budget"])
    assert words == ["--budget", "96,160"]
    assert main.make_context("run", words).params["budget"] == (96, 160)


def test_a_password_is_masked() -> None:
    url = "mysql://me:hunter2@db/x"
    settings = {**SETTINGS, "storage": url}
    assert "hunter2" not in module_command("run", *given_options(main, settings, ["storage"]))
    assert "hunter2" not in " ".join(study_place(Path("runs"), url))


def test_the_usual_place_needs_no_flags() -> None:
    assert study_place(Path("runs"), None) == []
    assert study_place(Path("x"), None) == ["--root", "x"]
