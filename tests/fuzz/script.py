"""A random program as a script: lines of its options in the places of its family's template."""

import ast
import re
import textwrap
from functools import cache
from pathlib import Path

from tests.fuzz import templates

PLAIN = {  # places that hold one expression or statement, without an option for them
    "dtype": "torch.float64",
    "parts": "[of(layers)]",
    "clip": "pass",
    "log": "pass",
    "window": "1",
    "batches": "4, 4, 4",
    "scaler": "False",
    "synced": "False",
    "clips": "False",
    "reduction": "mean",
}


def render(program):
    """The script of ``program``."""
    places = {}
    for option in program.options():
        for place, code in option.code.items():
            places.setdefault(place, []).append(code)
    if program.choice("training") != "automatic":  # the module clips, the Trainer must not
        places["trainer"] = [code for code in places.get("trainer", []) if "clip" not in code]
    optimizer = places.pop("optimizer")[0].format(places["groups"][0].format("part"))
    scheduler = places.get("scheduler", [""])[0].format("o")
    schedulers = "self.lr_schedulers()" if "parts" in places else "[self.lr_schedulers()]"
    steps = f"for scheduler in {schedulers}:\n    scheduler.step()" if scheduler else "pass"
    values = {
        "seed": str(program.seed),
        "ranks": str(program.ranks),
        "description": program.description(),
        "classes": _classes(
            program.blocks + (["Linear()"] if "new layer" in program.choice("freeze") else [])
        ),
        "layers": ", ".join(program.blocks),
        "optimizer": optimizer,
        "schedulers": f"[{scheduler} for o in optimizers]" if scheduler else "[]",
        "ddp": "ddp_find_unused_parameters_true"
        if any(o.unused for o in program.options())
        else "ddp",
        "times": "2" if program.choice("again") == "fit twice" else "1",
        "strategies": " ".join(program.strategies),
        "unused": str(any(option.unused for option in program.options())),
        "clipped": str("clip_by_hand" in places),
        "steps": steps,
    }
    for place, plain in PLAIN.items():
        values[place] = places.pop(place, [plain])[0]
    for place in ("ring", "trainer", "callbacks", "horovod"):
        values[place] = ", ".join(places.pop(place, []))
    template = (
        templates.MODULE
        + (templates.TRAINER if program.family == "trainer" else templates.LOOP)
        + templates.MAIN
    )
    for place in re.findall(r"\$(\w+)", template):
        values.setdefault(
            place, "\n".join(places.get(place, [])) or ("" if place == "methods" else "pass")
        )
    text = template
    # a place may name another place
    while match := re.search(r"^( *)([^$\n]*)\$(\w+)", text, re.MULTILINE):
        indent, before, place = match.groups()
        code = (
            textwrap.indent(values[place], indent).removeprefix(indent)
            if not before.strip()
            else values[place]
        )
        text = text[: match.start()] + indent + before + code + text[match.end() :]
    # an empty hook would count as overridden
    text = re.sub(r"    def \w+\(.*\):\n +pass\n\n", "", text)
    return re.sub(r"(?<!:)\n +pass(?=\n)", "", text)


def _classes(names):
    """Source of the blocks that ``names`` call, and of those that they derive from, in the order
    of the file.
    """
    sources, parents = _blocks()
    needed = {name for text in names for name in re.findall(r"[A-Z]\w+(?=\()", text)}
    needed |= {parents[name] for name in needed}
    return "\n\n\n".join(source for name, source in sources.items() if name in needed)


@cache
def _blocks():
    """Source and first parent of each class of ``blocks.py``, from its text: importing it would
    import torch.
    """
    text = Path(__file__).with_name("blocks.py").read_text()
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    sources = {node.name: ast.get_source_segment(text, node) or "" for node in classes}
    return sources, {node.name: ast.unparse(node.bases[0]) for node in classes}
