"""The rules of the house's budgets: each is a function from a parsed file to what it finds wrong.

tests/unit/test_budgets.py runs them over the source, proves that each can fail and holds the exceptions.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60  # from `def` to the last line, docstring included
MAX_CONSTRUCTOR_PARAMETERS = 8

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One file: its path from the root with forward slashes, its text and its tree."""

    path: str
    text: str
    tree: ast.Module


@dataclass(frozen=True)
class Finding:
    """A breach: what the rule says, where, and the name that an exception would have to give."""

    rule: str
    path: str
    line: int
    name: str
    says: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.name}: {self.says} [{self.rule}]"


Hit = tuple[int, str, str]  # line, name, what is wrong


def parse(path: Path, root: Path) -> Source:
    """The file as a Source; raises SyntaxError where it is no Python."""
    text = path.read_text(encoding="utf-8")
    return Source(path.relative_to(root).as_posix(), text, ast.parse(text))


def functions(tree: ast.AST) -> Iterator[FunctionNode]:
    return (node for node in ast.walk(tree) if isinstance(node, FunctionNode))


def dotted(node: ast.AST) -> str:
    """``a.b.c`` for a chain of names, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


# ------------------------------------------------------------------------------------------------ the rules


def file_length(source: Source) -> Iterator[Hit]:
    lines = len(source.text.splitlines())
    if lines > MAX_FILE_LINES:
        yield 1, "file", f"{lines} lines, at most {MAX_FILE_LINES}"


def function_length(source: Source) -> Iterator[Hit]:
    for node in functions(source.tree):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            yield node.lineno, node.name, f"{lines} lines, at most {MAX_FUNCTION_LINES}"


def _is_record(node: ast.ClassDef) -> bool | None:
    """True for a frozen keyword-only dataclass, False for another dataclass, None for no dataclass.

    In a frozen keyword-only record every value is named where it is given, like a row of a table: its
    width is the subject's. The budget is for what gathers parts that it then works with.
    """
    for decorator in node.decorator_list:
        call = decorator.func if isinstance(decorator, ast.Call) else decorator
        if dotted(call).split(".")[-1] == "dataclass":
            keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
            on = {k.arg for k in keywords if isinstance(k.value, ast.Constant) and k.value.value is True}
            return {"frozen", "kw_only"} <= on
    return None


def _dataclass_fields(node: ast.ClassDef) -> int:
    fields = 0
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item.annotation):
            made = "init=False" in ast.unparse(item.value) if item.value else False
            fields += not made
    return fields


def constructor(source: Source) -> Iterator[Hit]:
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ClassDef):
            continue
        count = _dataclass_fields(node) if _is_record(node) is False else 0
        for item in node.body:
            if isinstance(item, FunctionNode) and item.name == "__init__":
                args = item.args
                stars = (args.vararg is not None) + (args.kwarg is not None)
                count = len(args.posonlyargs + args.args + args.kwonlyargs) - 1 + stars
        if count > MAX_CONSTRUCTOR_PARAMETERS:
            yield node.lineno, node.name, f"{count} parameters, at most {MAX_CONSTRUCTOR_PARAMETERS}"


def annotated(source: Source) -> Iterator[Hit]:
    methods = {f for c in ast.walk(source.tree) if isinstance(c, ast.ClassDef) for f in c.body}
    for node in functions(source.tree):
        args = node.args
        plain = args.posonlyargs + args.args
        static = any(dotted(d) == "staticmethod" for d in node.decorator_list)
        if node in methods and not static:
            plain = plain[1:]  # self or cls
        every = [*plain, *args.kwonlyargs, *(a for a in (args.vararg, args.kwarg) if a)]
        bare = [a.arg for a in every if a.annotation is None] + ([] if node.returns else ["return"])
        if bare:
            yield node.lineno, node.name, f"not annotated: {', '.join(bare)}"


MUTABLE_CALLS = frozenset(
    {"list", "dict", "set", "bytearray", "defaultdict", "OrderedDict", "Counter", "ChainMap", "deque"}
    | {"array", "Queue", "SimpleQueue", "LifoQueue", "PriorityQueue", "SimpleNamespace", "threading.local"}
    | {"WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "itertools.count", "itertools.cycle"}
)


def _is_mutable(node: ast.AST | None) -> bool:
    """Whether a module-level value can change later; what freezes its argument is trusted with that alone."""
    if isinstance(node, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        return True
    if isinstance(node, ast.Tuple):
        return any(_is_mutable(item) for item in node.elts)
    if isinstance(node, ast.BinOp):
        return _is_mutable(node.left) or _is_mutable(node.right)
    if isinstance(node, ast.IfExp):
        return _is_mutable(node.body) or _is_mutable(node.orelse)
    if isinstance(node, ast.Call):
        full = dotted(node.func)
        name = full.split(".")[-1]
        if name in ("MappingProxyType", "tuple") and node.args:
            inner = node.args[0]
            values = inner.values if isinstance(inner, ast.Dict) else getattr(inner, "elts", [])
            return any(_is_mutable(value) for value in values)
        return name in MUTABLE_CALLS or full in MUTABLE_CALLS
    return False


def _module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when the module is imported, those inside `if`, `try`, `for`, `with` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.For | ast.While | ast.With):
            for block in ("body", "orelse", "finalbody"):
                yield from _module_level(getattr(node, block, []))
            for handler in getattr(node, "handlers", []):
                yield from _module_level(handler.body)


def module_state(source: Source) -> Iterator[Hit]:
    for node in _module_level(source.tree.body):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            name = ", ".join(ast.unparse(target) for target in targets)
            if name != "__all__" and _is_mutable(node.value):
                yield node.lineno, name, "mutable state at module level; freeze it, or let someone own it"
        elif isinstance(node, ast.AugAssign):
            yield node.lineno, ast.unparse(node.target), "changed at module level"
    for walked in ast.walk(source.tree):
        if isinstance(walked, ast.Global):
            yield walked.lineno, ", ".join(walked.names), "`global` makes a module's name a variable"


def star_import(source: Source) -> Iterator[Hit]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            yield node.lineno, node.module or ".", "import *"


ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"})


def environment(source: Source) -> Iterator[Hit]:
    if source.path.startswith("src/stretto/launch/"):
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and dotted(node) in {f"os.{name}" for name in ENVIRONMENT}:
            yield node.lineno, f"os.{node.attr}", "the environment is read in launch/ alone"
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            for alias in node.names:
                if alias.name in ENVIRONMENT:
                    yield node.lineno, f"os.{alias.name}", "the environment is read in launch/ alone"


PICKLERS = frozenset({"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"})
PICKLING_CALLS = frozenset({"torch.load", "torch.save", "torch.serialization.load", "torch.serialization.save"})
PICKLING_NAMES = frozenset(
    {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"}
    | {"send_object_list", "recv_object_list", "read_pickle", "to_pickle"}
)


def unpickling(source: Source) -> Iterator[Hit]:
    says = "pickles; nothing is ever unpickled here: use JSON, safetensors or plain tensors"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [dotted(node) or f"?.{node.attr}"]
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            names = [] if isinstance(node.value, ast.Constant) and node.value.value is False else ["pickle"]
        else:
            continue
        for name in names:
            imported = not isinstance(node, ast.Attribute)
            by_module = imported and name.split(".")[0] in PICKLERS
            if by_module or name in PICKLING_CALLS or name.split(".")[-1] in PICKLING_NAMES:
                yield getattr(node, "lineno", 1), name, says


UNFINISHED = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")) + r")\b")


def unfinished(source: Source) -> Iterator[Hit]:
    for number, line in enumerate(source.text.splitlines(), 1):
        if found := UNFINISHED.search(line):
            yield number, found[0], "finish it, or say in words what is not built"


Rule = Callable[[Source], Iterator[Hit]]
SIZES: MappingProxyType[str, Rule] = MappingProxyType(
    {"file-length": file_length, "function-length": function_length, "unfinished": unfinished}
)
HABITS: MappingProxyType[str, Rule] = MappingProxyType(
    {
        "constructor": constructor,
        "annotations": annotated,
        "module-state": module_state,
        "star-import": star_import,
        "environment": environment,
        "unpickling": unpickling,
    }
)
EVERY_RULE = MappingProxyType({**SIZES, **HABITS})


def findings(source: Source) -> list[Finding]:
    """What is wrong with one file. Sizes hold for every file, habits for the product."""
    rules = EVERY_RULE if source.path.startswith("src/") else SIZES
    return [Finding(name, source.path, *hit) for name, rule in rules.items() for hit in rule(source)]
