from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from sb_lightning.cli import checks, doctor, gloo_pair, main
from sb_lightning.cli.checks import Check

REQUIRED = ["torch>=2.11", "lightning!=2.6.2,!=2.6.3,<3,>=2.6.1", "triton>=3; platform_system == 'Nowhere'",
            "pytest>=8; extra == 'dev'"]  # fmt: skip


@pytest.fixture
def installed(monkeypatch):
    """Versions by name, in place of those of this environment; a missing name is not installed."""
    versions = {"torch": "2.13.0+cpu", "lightning": "2.6.6", "pytorch-lightning": "2.6.6"}

    def version(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    fake = SimpleNamespace(
        requires=lambda name: REQUIRED, version=version, PackageNotFoundError=metadata.PackageNotFoundError,
        distribution=metadata.distribution,
    )  # fmt: skip
    monkeypatch.setattr(checks, "metadata", fake)
    return versions


def lines(check):
    return {line.name: line for line in check()}


def reds(check):
    return {name: line for name, line in lines(check).items() if line.status == "red"}


def test_right_versions_are_green(installed):
    assert {name: line.status for name, line in lines(checks.check_packages).items()} == {
        "torch": "ok", "lightning": "ok", "pytorch-lightning": "info", "pybind11": "info",
    }  # fmt: skip
    assert "optional" in lines(checks.check_packages)["pybind11"].detail
    assert lines(checks.check_blocked_lightning) == {}


@pytest.mark.parametrize(
    ("name", "version", "fix"),
    [
        ("torch", "2.10.1", "pip install 'torch>=2.11'"),
        ("torch", None, "pip install 'torch>=2.11'"),
        ("lightning", "2.6.2", "pip install 'lightning"),
        ("lightning", "2.7.0a0", None),
        ("lightning", "3.0.0", "pip install 'lightning"),
    ],
)
def test_versions_that_are_refused(installed, name, version, fix):
    installed.pop(name)
    if version is not None:
        installed[name] = version
    found = reds(checks.check_packages)
    assert set(found) == ({name} if fix else set())
    if fix:
        assert found[name].fix.startswith(fix)
        assert (version or "not installed") in found[name].detail


def test_a_package_that_is_not_installed_itself(installed, monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(checks.metadata, "requires", missing)
    installed["torch"] = "2.9"
    assert set(reds(checks.check_packages)) >= {"sb-lightning", "torch"}


@pytest.mark.parametrize("name", ["lightning", "pytorch-lightning"])
@pytest.mark.parametrize("version", ["2.6.2", "2.6.3"])
def test_malware_is_red(installed, name, version):
    installed[name] = version
    (line,) = reds(checks.check_blocked_lightning).values()
    assert line.name == f"{name} {version}"
    assert "malware" in line.detail


def test_an_old_python_is_red(monkeypatch):
    monkeypatch.setattr(checks.sys, "version_info", (3, 9, 18))
    assert "3.9.18" in reds(checks.check_python)["python"].detail


def make_package(folder):
    (folder / "sb_lightning").mkdir(parents=True)
    (folder / "sb_lightning" / "__init__.py").touch()
    return folder / "sb_lightning"


def test_a_folder_that_hides_the_installed_package_is_red(monkeypatch, tmp_path):
    monkeypatch.setattr(checks, "_installed_location", lambda: make_package(tmp_path))
    line = reds(checks.check_location)["package"]
    assert "hides" in line.detail
    assert str(tmp_path) in line.detail


def test_a_second_copy_in_the_current_folder_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(checks, "_installed_location", lambda: None)
    assert set(lines(checks.check_location)) == {"package"}
    make_package(tmp_path)
    monkeypatch.chdir(tmp_path)
    line = lines(checks.check_location)["another package"]
    assert line.status == "warn"
    assert "commands that run in a clone use the clone" in line.fix


@pytest.mark.parametrize("is_editable", [True, False])
def test_where_it_is_installed(monkeypatch, tmp_path, is_editable):
    origin = {"url": f"file://{tmp_path}/a%20b", "dir_info": {"editable": is_editable}}
    distribution = SimpleNamespace(
        read_text=lambda name: json.dumps(origin), locate_file=lambda name: tmp_path / "site" / name
    )
    monkeypatch.setattr(checks.metadata, "distribution", lambda name: distribution)
    expected = tmp_path / ("a b" if is_editable else "site") / "sb_lightning"
    assert checks._installed_location() == expected


def test_extension_files(monkeypatch, tmp_path):
    package = make_package(tmp_path)
    monkeypatch.setattr(checks.sb_lightning, "__file__", str(package / "__init__.py"))
    assert "build_ext --inplace" in reds(checks.check_extension)["extension"].fix
    (package / "_attention.abi3.so").touch()
    assert lines(checks.check_extension)["extension"].status == "ok"
    (package / "_attention.cpython-311-x86_64-linux-gnu.so").touch()
    assert lines(checks.check_extension)["extensions"].status == "warn"


def test_backends_are_listed_with_their_reason(monkeypatch):
    import sb_lightning.attention

    def backend(name, available, reason, detail):
        return SimpleNamespace(name=name, available=available, reason=reason, detail=detail)

    monkeypatch.setattr(
        sb_lightning.attention,
        "backends",
        lambda: [
            backend("cpu", False, "built for another torch", {}),
            backend("cuda", False, "no GPU", {}),
            backend("reference", True, "plain torch", {"threads": "2"}),
        ],
    )
    found = lines(checks.check_backends)
    statuses = {name.split()[-1]: line.status for name, line in found.items()}
    assert statuses == {"cpu": "red", "cuda": "info", "reference": "ok"}
    assert "built for another torch" in found["attention backend cpu"].detail
    assert "threads 2" in found["attention backend reference"].detail


def test_the_real_backends_are_listed():
    assert {"attention backend cpu", "attention backend reference"} <= set(lines(checks.check_backends))


def test_the_latency_engine_is_told(monkeypatch):
    import sb_lightning.latency
    from sb_lightning.latency.engine import REBUILD, Engine

    monkeypatch.setattr(sb_lightning.latency, "ENGINE", Engine("C++", "latency tables run in C++"))
    line = lines(checks.check_latency_engine)["latency engine"]
    assert (line.status, line.detail, line.fix) == ("ok", "C++: latency tables run in C++", "")
    reason = f"latency tables run in plain Python, slowly: _core is not built; {REBUILD}"
    monkeypatch.setattr(sb_lightning.latency, "ENGINE", Engine("Python", reason))
    line = lines(checks.check_latency_engine)["latency engine"]
    assert line.status == "warn"
    assert line.detail == "Python: latency tables run in plain Python, slowly: _core is not built"
    assert "build_ext --inplace" in line.fix


def test_the_latency_engine_is_in_both_forms_of_the_report(only, capsys):
    only(checks.check_latency_engine)
    assert main(["doctor", "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)["checks"]
    assert line["name"] == "latency engine"
    assert main(["doctor"]) == 0
    assert f"{line['status']:<5}latency engine" in capsys.readouterr().out


def test_a_missing_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    line = lines(checks.check_compiler)["compiler"]
    assert line.status == "warn"
    assert "'no-such-compiler'" in line.detail
    assert "apt-get install g++" in line.fix
    monkeypatch.setenv("CXX", f"{sys.executable} -I")
    assert lines(checks.check_compiler)["compiler"].detail.startswith("Python 3")


def test_missing_tools_are_only_told(monkeypatch):
    monkeypatch.setattr(checks.shutil, "which", lambda *args, **kwargs: None)
    assert {(line.status, line.detail) for line in checks.check_build_tools()} == {("info", "not found")}


def test_no_tool_is_listed_twice():
    names = [line.name for check in (checks.check_packages, checks.check_build_tools) for line in check()]
    assert sorted(names) == sorted(set(names))


def test_processor_lines():
    assert {"processor", "threads", "gpu"} == set(lines(checks.check_processor))


def test_two_processes_meet():
    assert gloo_pair.run_pair(60) is None


@pytest.mark.parametrize(
    ("program", "problem"),
    [("import threading\nthreading.Event().wait()", "did not meet within 1 s"),
     ("raise SystemExit('no network')", "rank 0 ended with exit code 1: no network")],
)  # fmt: skip
def test_ranks_that_do_not_meet_are_red(monkeypatch, program, problem):
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(gloo_pair, "PROGRAM", program)
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **kwargs: started.append(popen(*args, **kwargs)) or started[-1]
    )
    monkeypatch.setattr(checks, "GLOO_TIMEOUT_S", 1.0 if "wait" in program else 60.0)
    (line,) = reds(checks.check_gloo).values()
    assert problem in line.detail
    assert "127.0.0.1" in line.fix
    assert all(process.poll() is not None for process in started)


GREEN = Check(name="a", status="ok", detail="fine")
RED = Check(name="b", status="red", detail="broken [not markup]", fix="mend it")


def broken():
    raise OSError("the check fell over")
    yield


@pytest.fixture
def only(monkeypatch):
    def use(*functions):
        monkeypatch.setattr(doctor.examine, "__defaults__", (functions,))

    return use


def test_json_is_all_that_is_printed(only, capsys):
    only(lambda: iter([GREEN, RED]))
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["version"] == 1
    assert report["ok"] is False
    assert report["checks"] == [
        {"name": "a", "status": "ok", "detail": "fine", "fix": ""},
        {"name": "b", "status": "red", "detail": "broken [not markup]", "fix": "mend it"},
    ]


def test_exit_code_and_text(only, capsys):
    only(lambda: iter([GREEN]))
    assert main(["doctor"]) == 0
    assert "Nothing is red." in capsys.readouterr().out
    only(lambda: iter([GREEN, RED]))
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    for part in ("broken [not markup]", "to fix it: mend it", "1 red line:", "sb doctor --json"):
        assert part in text


def test_a_check_that_breaks_is_a_red_line(only, capsys):
    only(broken, lambda: iter([GREEN]))
    assert main(["doctor", "--json"]) == 1
    first, second = json.loads(capsys.readouterr().out)["checks"]
    assert (first["status"], second["status"]) == ("red", "ok")
    assert "OSError: the check fell over" in first["detail"]


def test_wrong_options(capsys):
    assert main(["doctor", "--jso"]) == 2
    assert "--jso" in capsys.readouterr().err


def test_every_check_runs():
    assert set(checks.CHECKS) == {value for name, value in vars(checks).items() if name.startswith("check_")}
