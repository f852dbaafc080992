"""The help of ``fedbayes fit`` and its sisters on one page, where LightningCLI's own fills six hundred lines."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable

from lightning_fedbayes.cli.explain import subclass_names
from lightning_fedbayes.cli.text import plain

WIDTH, COLUMN = 110, 34
HELP = {
    "config": "YAML file; of several, and of options, the later wins",
    "print_config": "print the whole configuration, with every default, and exit",
    "optimizer": "CLASS of torch.optim, in place of the model's own; --optimizer.lr and so on",
    "lr_scheduler": "CLASS of torch.optim.lr_scheduler, one step per round",
    "ckpt_path": "FILE of a checkpoint to load, or to go on from; 'last' or 'best'",
    "weights_only": "load a checkpoint without executing any code in it",
}
"""Said better than in the docstrings that the options come from."""


def short_help(command: str, description: str, actions: Iterable[argparse.Action], classes: dict[str, type]) -> str:
    """One line per option, in groups; options of the Trainer by name only.

    Args:
        command: such as "fit".
        description: what it does, one sentence.
        actions: of its parser.
        classes: key → base class, of the keys that take a class, such as "model".
    """
    options = {action.dest: action for action in actions if _is_option(action)}
    heads = {name.partition(".")[0] for name in options if "." in name}
    general = [_line(name, option) for name, option in options.items()
               if "." not in name and name not in {*heads, *classes}]
    sections = [f"usage: fedbayes {command} --config FILE [--KEY VALUE ...]", description,
                "\n".join(["options:", *general])]
    for head in sorted(heads - {"trainer"}):
        lines = [_line(name, option) for name, option in options.items() if name.startswith(f"{head}.")]
        sections.append("\n".join([f"{head}:", *lines]))
    for key, base in classes.items():
        names = ", ".join(name for name in subclass_names(base) if name != base.__name__)
        sections.append(f"--{key} CLASS, --{key}.ARGUMENT VALUE (arguments: fedbayes {command} --{key}.help CLASS)\n"
                        + _wrapped(names or f"any {base.__name__}"))
    trainer = ", ".join(name.partition(".")[2] for name in options if name.startswith("trainer."))
    sections.append(f"--trainer.ARGUMENT VALUE, of lightning.Trainer\n{_wrapped(trainer)}")
    return "\n\n".join(sections) + "\n"


def class_help(name: str, actions: Iterable[argparse.Action]) -> str:
    """The arguments of the class ``name``, one line each; ``actions`` are those of a parser for it alone."""
    lines = [_line(action.dest, action) for action in actions if _is_option(action)]
    return "\n".join([f"arguments of {name}:", *lines]) + "\n"


def option_names(actions: Iterable[argparse.Action]) -> list[str]:
    """Names of the options that a user can give, without dashes."""
    return [action.dest for action in actions if _is_option(action)]


def _is_option(action: argparse.Action) -> bool:
    """Whether an action is neither a help nor the target of a link, which cannot be given."""
    names = action.option_strings
    return bool(names) and names[-1].startswith("--") and not names[0].endswith((".help", "--help", "-h"))


def _line(name: str, action: argparse.Action) -> str:
    default = action.default
    text = HELP.get(name) or plain(action.help or "")
    if isinstance(default, str | int | float) and default is not argparse.SUPPRESS:
        text += f" (default: {default})"
    head = f"  --{name} ".ljust(COLUMN)
    lines = textwrap.wrap(text, WIDTH - COLUMN, max_lines=3, placeholder=" …")
    if len(head) > COLUMN:  # the text begins below it
        lines.insert(0, "")
    return head + f"\n{' ' * COLUMN}".join(lines)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="  ")
