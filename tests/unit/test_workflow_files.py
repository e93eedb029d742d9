"""The workflows: valid YAML, and every command in them names targets, files and artifacts that are there."""

from __future__ import annotations

import os
import re
import unittest
from pathlib import Path
from typing import Any

import pytest
from parameterized import parameterized

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / ".github").rglob("*.yml"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
MADE = {"dist", "build", ".venv"}
"""What targets make: it is not there before."""
PATH = re.compile(r"(?<![\w$./-])\.?(?:[\w-]+/)+[\w.*-]+")


def read(file: Path) -> Any:
    return yaml.safe_load(file.read_text())


def commands(workflow: Any) -> list[str]:
    """The lines of all `run:` steps."""
    steps = [step for job in workflow["jobs"].values() for step in job.get("steps", [])]
    return [line.strip() for step in steps for line in step.get("run", "").splitlines() if line.strip()]


def problems(workflow: Any) -> list[str]:
    """One sentence for each thing that a workflow names and that is not there."""
    sentences = []
    for line in commands(workflow):
        for target in re.findall(r"\bmake ((?:[\w-]+ ?(?==|\w)?)+)", line):
            wanted = [word for word in target.split() if "=" not in word and word.islower()]
            sentences += [f"{line}: the Makefile has no target {word}" for word in wanted if word not in TARGETS]
        for path in PATH.findall(line.replace('"', " ")):
            if path.split("/")[0] not in MADE | {"clean", "bin"} and not (ROOT / path).exists():
                sentences.append(f"{line}: there is no {path}")
        if line.startswith(".") and line.split("/")[0] not in MADE and not os.access(ROOT / line.split()[0], os.X_OK):
            sentences.append(f"{line}: cannot be executed")
    jobs = workflow["jobs"]
    for name, job in jobs.items():
        needs = job.get("needs", [])
        for other in [needs] if isinstance(needs, str) else needs:
            if other not in jobs:
                sentences.append(f"{name} needs {other}, which is no job")
        if "uses" in job and not (ROOT / job["uses"]).is_file():
            sentences.append(f"{name} uses {job['uses']}, which is not there")
        if "uses" not in job and not {"runs-on", "steps", "timeout-minutes"} <= set(job):
            sentences.append(f"{name} has no runner, steps or limit of time")
        for step in job.get("steps", []):
            pattern = step.get("with", {}).get("cache-dependency-path")
            if pattern is not None and not list(ROOT.glob(pattern)):
                sentences.append(f"{name}: no file is called {pattern}")
            if ("run" in step) == ("uses" in step):
                sentences.append(f"{name}: a step must have one of run and uses: {step}")
    return sentences


class TestWorkflows(unittest.TestCase):
    def test_all_files_are_yaml(self) -> None:
        self.assertGreaterEqual(len(FILES), 6)
        for file in FILES:
            self.assertIsInstance(read(file), dict, file)

    @parameterized.expand([(file.name,) for file in WORKFLOWS])
    def test_what_a_workflow_names_is_there(self, name: str) -> None:
        workflow = read(ROOT / ".github" / "workflows" / name)
        self.assertTrue(commands(workflow))
        self.assertEqual(problems(workflow), [])

    def test_the_targets_that_the_workflows_run(self) -> None:
        lines = "\n".join(line for file in WORKFLOWS for line in commands(read(file)))
        for target in ("test-oldest", "test-long", "test-gpu", "package", "docs", "demo", "soak"):
            self.assertRegex(lines, rf"\bmake {target}\b")
        self.assertIn(".ci/run", lines)

    @parameterized.expand(
        [
            ("target", {"run": "make tset"}, "the Makefile has no target tset"),
            ("file", {"run": "python release/smok.py"}, "there is no release/smok.py"),
            ("script", {"run": ".ci/rum"}, "cannot be executed"),
            ("pins", {"uses": "x", "with": {"cache-dependency-path": "requirements-old.txt"}}, "no file is called"),
            ("step", {"name": "nothing"}, "must have one of run and uses"),
        ]
    )
    def test_a_fault_is_found(self, _: str, step: dict[str, Any], said: str) -> None:
        job = {"runs-on": "ubuntu-latest", "timeout-minutes": 1, "steps": [step]}
        self.assertIn(said, "\n".join(problems({"jobs": {"one": job}})))

    def test_a_job_that_is_not_there_is_found(self) -> None:
        self.assertIn("needs two, which is no job", "\n".join(problems({"jobs": {"one": {"needs": ["two"]}}})))

    def test_the_versions_of_python_that_are_tested_are_those_that_are_promised(self) -> None:
        tested = read(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]["cpu"]["strategy"]["matrix"]["python"]
        row = next(
            line for line in (ROOT / "docs" / "support.md").read_text().splitlines() if line.startswith("| Python")
        )
        _, _, oldest, newest, where, _ = (cell.strip() for cell in row.split("|"))
        self.assertEqual([oldest, newest], [tested[0], tested[-1]])
        self.assertEqual(re.findall(r"3\.\d+", where), tested)
