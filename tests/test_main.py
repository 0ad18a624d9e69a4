"""python -m fastamp: what it reports of a whole package and of broken ones."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fastamp
from fastamp import _diagnostics, _library
from fastamp.__main__ import main

PACKAGE = Path(fastamp.__file__).parent


# An editable installation would serve the compiled parts of the original to a copy that lacks them.
ONLY_FROM_HERE = """
import runpy, sys
sys.meta_path = [f for f in sys.meta_path if "__editable__" not in getattr(f, "__module__", "")]
sys.argv[0] = "fastamp"
runpy.run_module("fastamp", run_name="__main__", alter_sys=True)
"""


def run(*arguments, cwd=None, **environment):
    environment = {"PYTHONPATH": str(cwd or PACKAGE.parent), "FASTAMP_HOST": "1", **environment}
    program = ["-m", "fastamp"] if cwd is None else ["-c", ONLY_FROM_HERE]
    return subprocess.run(
        [sys.executable, *program, *arguments],
        cwd=cwd or PACKAGE.parent,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def line(output, name):
    (found,) = [text for text in output.splitlines() if text.startswith(name)]
    return found


@pytest.fixture
def copy(tmp_path):
    """The package without its compiled parts, as a folder to run in."""
    shutil.copytree(PACKAGE, tmp_path / "fastamp", ignore=shutil.ignore_patterns("*.so", "*.pyd", "__pycache__"))
    return tmp_path


def test_report_of_a_built_package():
    done = run()
    assert done.returncode == 0, done.stderr
    assert fastamp.__version__ in line(done.stdout, "fastamp")
    assert "loaded, " + _library.ops_path in line(done.stdout, "operators")
    assert line(done.stdout, "self-check").endswith("unscale_ on cpu right")
    assert "cpu, " in line(done.stdout, "devices")
    if _library.host is not None:
        assert "loaded, " + _library.host.__file__ in line(done.stdout, "host module")


def test_host_module_switched_off():
    done = run(FASTAMP_HOST="0")
    assert done.returncode == 0
    assert line(done.stdout, "host module").endswith("not loaded: disabled by FASTAMP_HOST=0")
    assert "unset FASTAMP_HOST" in done.stdout


def test_host_module_that_does_not_load(copy):
    (copy / "fastamp" / Path(_library.ops_path).name).symlink_to(_library.ops_path)
    (copy / "fastamp" / "_host.abi3.so").write_text("built for another torch")
    done = run(cwd=copy)
    assert done.returncode == 0, done.stderr
    assert "not loaded: " in line(done.stdout, "host module")
    assert "The host module does not load" in done.stdout
    assert f"{os.path.normpath(sys.executable)} -m pip install --no-build-isolation ." in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("content", [None, "built for another torch"], ids=["missing", "broken"])
def test_operators_that_do_not_load(copy, content):
    if content is not None:
        (copy / "fastamp" / "_ops.abi3.so").write_text(content)
    done = run(cwd=copy)
    assert done.returncode == 1, done.stderr
    assert "NOT LOADED" in line(done.stdout, "operators")
    assert "1. The operators do not load." in done.stdout
    assert f"{os.path.normpath(sys.executable)} -m pip install --no-build-isolation ." in done.stdout
    assert "Traceback" not in done.stderr


def test_operators_that_compute_wrong_values(monkeypatch, capsys):
    from fastamp import ops

    monkeypatch.setattr(ops, "unscale_", lambda grads, found_inf, inv_scale: None)
    assert _diagnostics.main() == 1
    assert "unscale_ on cpu WRONG" in capsys.readouterr().out


def leave(capsys, *arguments):
    """Exit code and output of a call that argparse ends."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    output = capsys.readouterr()
    return end.value.code, output.out + output.err


def test_help_lists_the_commands(capsys):
    code, output = leave(capsys, "--help")
    assert code == 0
    assert "usage: python -m fastamp" in output and "  demo  " in output


def test_version(capsys):
    assert leave(capsys, "--version") == (0, f"fastamp {fastamp.__version__}\n")


def test_command_gets_its_own_arguments(capsys):
    code, output = leave(capsys, "demo", "--help")
    assert code == 0
    assert "usage: python -m fastamp demo" in output and "--accumulation" in output


def test_unknown_command(capsys):
    code, output = leave(capsys, "train")
    assert code == 2
    assert "invalid choice: 'train'" in output


@pytest.mark.parametrize(
    ("archs", "capability", "expected"),
    [
        (["sm_80"], (8, 0), True),
        (["sm_80"], (8, 6), True),
        (["sm_86"], (8, 0), False),
        (["sm_80"], (9, 0), False),
        (["sm_80", "compute_80"], (9, 0), True),
        (["compute_90"], (8, 0), False),
        (["sm_90a"], (9, 0), True),
        (["sm_100f"], (10, 3), True),
        (["sm_100a", "compute_100a"], (10, 3), False),
        (["sm_100"], (10, 3), True),
        (["sm_90", "sm_120"], (12, 0), True),
        ([], (9, 0), False),
    ],
)
def test_archs_that_a_gpu_can_run(archs, capability, expected):
    assert _diagnostics.runs_on(archs, capability) is expected


def test_cuda_problems():
    assert _diagnostics.cuda_problems(False, [], []) == []
    assert _diagnostics.cuda_problems(True, ["sm_80", "compute_80"], [(8, 0), (9, 0)]) == []
    (cpu_build,) = _diagnostics.cuda_problems(False, [], [(8, 0), (9, 0)])
    assert "for CPUs" in cpu_build and 'TORCH_CUDA_ARCH_LIST="8.0 9.0"' in cpu_build
    (too_old,) = _diagnostics.cuda_problems(True, ["sm_80"], [(8, 0), (9, 0)])
    assert "do not run on compute capability 9.0" in too_old and 'TORCH_CUDA_ARCH_LIST="8.0 9.0"' in too_old


def test_memory_is_there_after_import_fastamp():
    """And is imported when it is used, not before: it takes long."""
    program = "import sys, fastamp; assert 'fastamp.memory' not in sys.modules; print(fastamp.memory.estimate.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout == "estimate\n", done.stderr


def run_into_a_closed_pipe(*arguments):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "fastamp", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "PYTHONUNBUFFERED": ""}
    try:
        return subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=environment, timeout=300)
    finally:
        os.close(write)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["memory", "--help"]], ids=" ".join)
def test_a_closed_pipe_ends_a_command_quietly(arguments):
    done = run_into_a_closed_pipe(*arguments)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_closed_pipe_is_the_programs_own_affair(tmp_path):
    script = tmp_path / "prints.py"
    script.write_text("print('much', flush=True)\n")
    assert "BrokenPipeError" in run_into_a_closed_pipe("run", script).stderr
    script.write_text("try:\n    print(flush=True)\nexcept BrokenPipeError:\n    import os\n    os._exit(7)\n")
    assert run_into_a_closed_pipe("run", script).returncode == 7
