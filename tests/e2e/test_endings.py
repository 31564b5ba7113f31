"""Processes that end or fork while an engine computes: the code they asked for, no signal, no hang.

Each script is a process of its own. Prompts are long, so that the engine's thread is in native code nearly all the
time.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

COMPUTING = """
import asyncio, os, sys, threading, time
from draftwise import AsyncLLM, LLM, LLMEngine, SamplingParams

LONG = {"prompt_token_ids": [7 + i % 900 for i in range(700)]}
FOREVER = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0)
SHORT = SamplingParams(max_tokens=8, temperature=0)

def begin(llm, requests=12):
    # An event loop with requests that run; it is left as it is, with tasks pending.
    async def one():
        async for _ in llm.generate(LONG, FOREVER):
            pass
    async def main():
        tasks = [asyncio.ensure_future(one()) for _ in range(requests)]
        while not llm.stats().num_steps:
            await asyncio.sleep(0.001)
        return tasks
    loop = asyncio.new_event_loop()
    return loop, loop.run_until_complete(main())

def wait_for(child):
    deadline = time.monotonic() + 60
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, 9)
            sys.exit("a child hangs")
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(done[1])
"""


def run(script: str, code: int = 0) -> str:
    """What a script wrote to stderr; it has to end with this code."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPUTING + script],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    return done.stderr


def test_a_script_ends_while_the_engine_runs() -> None:
    """Exit code, and not a word but asyncio's about its pending tasks."""
    errors = run("kept = begin(AsyncLLM())\nsys.exit(3)", code=3)
    assert "Traceback" not in errors and "engine" not in errors, errors


def test_an_exception_ends_a_script_whose_engine_plans_ahead() -> None:
    errors = run("kept = begin(AsyncLLM(async_scheduling=True))\nraise ValueError('mine')", code=1)
    assert errors.count("Traceback") == 1 and "mine" in errors and "engine" not in errors, errors


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_daemon_thread_generates_when_the_script_ends(kernels: str) -> None:
    script = f"""
os.environ["DRAFTWISE_KERNELS"] = {kernels!r}
llm = LLM()
threading.Thread(target=lambda: llm.generate([LONG] * 8, FOREVER), daemon=True).start()
while not llm.stats().num_steps:
    time.sleep(0.001)
"""
    assert run(script) == ""


@pytest.mark.slow
def test_a_thread_that_is_no_daemon_uses_an_engine_to_its_own_end() -> None:
    script = """
def work():
    threading.main_thread().join()
    for options in ({}, {"async_scheduling": True}):
        with LLM(**options) as llm:
            assert llm.generate(LONG, SHORT)[0].finished
    os.write(2, b"done")
threading.Thread(target=work).start()
"""
    assert run(script) == "done"


@pytest.mark.slow
def test_the_end_in_other_orders() -> None:
    """A callback that closes, one that generates, and a thread that never comes back."""
    script = """
import atexit
llm, other = AsyncLLM(async_scheduling=True), LLM(async_scheduling=True)
kept = begin(llm)
other.generate(LONG, SHORT)
def late():
    llm.close()
    try:
        other.generate(LONG, SHORT)
    except Exception as error:
        os.write(2, type(error).__name__.encode())
from draftwise import lifetime
atexit.unregister(lifetime._end)  # later callbacks run first: ours has to come before the one above
atexit.register(late)
atexit.register(lifetime._end)
"""
    errors = run(script)
    assert errors.startswith("EngineDeadError") and "Traceback" not in errors


def test_engines_in_forked_children() -> None:
    """One at rest goes on in the child; one that runs says where it is. Nobody waits for threads that stayed behind."""
    script = """
llm = LLM(async_scheduling=True)
text = llm.generate(LONG, SHORT)[0].outputs[0].text
child = os.fork()
if child == 0:
    same = llm.generate(LONG, SHORT)[0].outputs[0].text == text
    llm.close()
    sys.exit(0 if same else 1)
assert wait_for(child) == 0
stepped = LLMEngine(async_scheduling=True)
stepped.add_request("r", LONG, SHORT)
stepped.step()
child = os.fork()
if child == 0:
    try:
        while True:
            stepped.step()
    except Exception as error:
        os._exit(7 if "forked" in str(error) else 1)
assert wait_for(child) == 7
running = AsyncLLM()
kept = begin(running)
for _ in range(4):
    child = os.fork()
    if child == 0:
        async def ask():
            async for _ in running.generate(LONG, SHORT):
                pass
        try:
            asyncio.new_event_loop().run_until_complete(ask())
        except Exception as error:
            running.stats()
            running.close()
            os._exit(7 if "forked" in str(error) else 1)
    assert wait_for(child) == 7
running.close()
"""
    run(script)


@pytest.mark.slow
def test_fork_on_plain_torch() -> None:
    """Torch's own threads do not survive a fork either."""
    script = """
os.environ["DRAFTWISE_KERNELS"] = "torch"
llm = LLM(num_threads=2)
text = llm.generate(LONG, SHORT)[0].outputs[0].text
child = os.fork()
if child == 0:
    os._exit(0 if llm.generate(LONG, SHORT)[0].finished else 1)
assert wait_for(child) == 0
"""
    run(script)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_multiprocessing_beside_an_engine(way: str) -> None:
    script = f"""
import multiprocessing
llm = LLM()
llm.generate(LONG, SHORT)
with multiprocessing.get_context({way!r}).Pool(2) as pool:
    assert pool.map(abs, [-1, -2, -3]) == [1, 2, 3]
assert llm.generate(LONG, SHORT)[0].finished
"""
    run(script)
