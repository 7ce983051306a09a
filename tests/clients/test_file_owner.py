"""Errors name the user's line: which files are the user's own."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rayps_client.machine import file_owner
from rayps_client.machine.file_owner import is_users_code, place_in
from rayps_client.user_errors import place_of

import rayps


@pytest.mark.parametrize(
    "file", [__file__, "train.py", "/home/me/train", "<stdin>", "<ipython-input-3-0a1b>", "/tmp/ipykernel_17/340.py"]
)
def test_modules_scripts_and_cells_are_the_users(file):
    assert is_users_code(file)


@pytest.mark.parametrize(
    "file",
    ["<frozen importlib._bootstrap>", *(each.__file__ for each in (argparse, json, np, torch, rayps, file_owner))],
)
def test_what_is_installed_is_not(file):
    assert not is_users_code(file)


@pytest.mark.parametrize(
    "call", [lambda: argparse.ArgumentParser().add_argument("--x", bad=1), lambda: torch.ones(2) @ torch.ones(3)]
)
def test_the_place_of_an_error_is_the_users_line_and_not_a_librarys(call):
    with pytest.raises((TypeError, RuntimeError)) as caught:
        call()
    assert place_of(caught.value) == f" ({place_in(__file__, call.__code__.co_firstlineno)})"


def test_a_file_below_the_current_directory_is_named_from_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert place_in(str(tmp_path / "pkg" / "train.py"), 3) == str(Path("pkg/train.py:3"))
    assert place_in("/elsewhere/train.py", 3) == "/elsewhere/train.py:3"
