"""Runs a script or a module as ``python`` would, in which ``horovod`` is this package."""

from __future__ import annotations

import builtins
import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import InspectLoader, Loader
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType

from lightning_ring.errors import ConfigurationError, RankDiscoveryError
from lightning_ring.job.exit import say
from lightning_ring.job.launchers import launcher_variables

_ON_PATH = str(Path(__file__).with_name("on_path"))
# python -P: no folder of the script on sys.path
_IS_SAFE = bool(getattr(sys.flags, "safe_path", False))
_USAGE = (
    "usage: python -m lightning_ring.horovod SCRIPT.py [ARGUMENT ...]\n       ... -m MODULE "
    "[ARGUMENT ...]"
)
_replaced: list[ModuleType] = []  # the module that ran this one: its globals live as long as it


def main(arguments: Sequence[str]) -> int:
    """Run ``arguments``: a script and its arguments, or ``-m``, a module and its arguments.
    Returns an exit code.
    """
    if not arguments or arguments[0] in ("-h", "--help") or list(arguments) == ["-m"]:
        print(_USAGE, file=sys.stderr if not arguments else sys.stdout)
        return 2 if not arguments else 0
    _say_which()
    try:
        if arguments[0] == "-m":
            _put_on_path()
            return _run_module(arguments[1], arguments[2:])
        if not _IS_SAFE:
            sys.path[0] = os.path.dirname(os.path.realpath(arguments[0]))
        _put_on_path()
        return _run_script(arguments[0], arguments[1:])
    except ConfigurationError as error:
        say(str(error))
        return 2


def _put_on_path() -> None:
    """Have ``import horovod`` lead here: in this process, and in those that it starts."""
    if _ON_PATH not in sys.path:
        sys.path.insert(0 if _IS_SAFE else 1, _ON_PATH)  # `multiprocessing` hands sys.path on
    others = [
        entry
        for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if entry not in ("", _ON_PATH)
    ]
    os.environ["PYTHONPATH"] = os.pathsep.join([_ON_PATH, *others])
    sys.path.insert(0, _ON_PATH)
    try:
        import horovod  # noqa: F401  (before a folder of that name beside the script is found)
    finally:
        del sys.path[0]


def _say_which() -> None:
    try:
        launched = launcher_variables(os.environ)
    except RankDiscoveryError:
        return  # `init` says it
    if launched is not None and launched.rank != 0:
        return
    try:
        other = f"; the installed horovod {version('horovod')} is not used"
    except PackageNotFoundError:
        other = ""
    say(f"`import horovod` gives lightning_ring.horovod{other}")


def _run_script(script: str, arguments: Sequence[str]) -> int:
    path = os.path.abspath(script)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        raise ConfigurationError(f"{script}: {error.strerror}. {_USAGE}") from error
    sys.argv = [script, *arguments]
    return _run(
        lambda: compile(source, path, "exec", dont_inherit=True),
        path,
        None,
        SourceFileLoader("__main__", path),
    )


def _run_module(name: str, arguments: Sequence[str]) -> int:
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"-m {name}: {error}.") from error
    if spec is None or spec.origin is None or not isinstance(spec.loader, InspectLoader):
        raise ConfigurationError(
            f"-m {name}: there is no such module, or it is a package without __main__.py."
        )
    loader, path, name_of_code = spec.loader, spec.origin, spec.name
    sys.argv = [path, *arguments]
    return _run(lambda: loader.get_code(name_of_code), path, spec, loader)


def _run(
    compiled: Callable[[], CodeType | None], path: str, spec: ModuleSpec | None, loader: Loader
) -> int:
    """Run the code in a new module ``__main__``, so that pickles, other processes and tracebacks
    name the script's.
    """
    module = ModuleType("__main__")
    package = spec.parent if spec is not None else None
    vars(module).update(
        __file__=path,
        __spec__=spec,
        __loader__=loader,
        __package__=package,
        __cached__=None,
        __builtins__=builtins,
    )
    _replaced.append(sys.modules["__main__"])
    sys.modules["__main__"] = module
    try:
        code = compiled()
        assert code is not None
        exec(code, vars(module))
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0
