"""One trial: a poisonous request beside innocent ones, and what became of all of them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from alignedserve.launch.keeper import QUICK_DEATH_S
from tests.adapters import make_adapter
from tests.end_to_end.client import Wanted, check_greedy, client, command, mixed, tokens_of
from tests.end_to_end.deployment import BACK_S, MODEL, NAME, Deployment, deployed, wait_until
from tests.end_to_end.patient import ENDED
from tests.poison.places import BY_NAME, DIRECT, HANGS, LORA, SEEN, TOKENS, Place

INNOCENTS = 4
MOST_DEATHS = 3
REST_S = QUICK_DEATH_S + 1.0
MOST_REPEATS = 8  # of an innocent whose connection broke
STUCK_S = 90.0  # for all answers of a trial
HUNG_S = 15.0  # for what hangs to be ended
SEEN_S = 5.0
_SEED = 80_000_000  # of the first request; eight digits stand nowhere else
_ENDED = re.compile(r"^alignedserve: (\S+) (?:was ended by|ended with) (\S+)$", re.MULTILINE)
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


class Poison:
    """Arms requests, one at a time, for a deployment that `plant` was put into, or `environment`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0
        self.prompts: list[str] = []  # of the last request, as a log would show them
        (folder / "ids").touch()

    @property
    def plant(self) -> str:
        return f"from pathlib import Path\nfrom tests.poison.planting import plant\nplant(Path({str(self._folder)!r}))"

    @property
    def environment(self) -> dict[str, str]:
        """Return the path of Python with a folder before all others that plants it."""
        (self._folder / "sitecustomize.py").write_text(self.plant)
        root = str(Path(__file__).parents[2])
        return {"PYTHONPATH": os.pathsep.join([str(self._folder), root, *filter(None, [os.environ.get("PYTHONPATH")])])}

    @property
    def struck(self) -> list[int]:
        """Return the processes in which it has struck."""
        strikes = self._folder / "strikes"
        return [int(line.split()[0]) for line in strikes.read_text().splitlines()] if strikes.exists() else []

    @property
    def num_strikes(self) -> int:
        return len(self.struck)

    def arm(self, place: str, way: str, model: str = NAME) -> tuple[str, dict[str, Any]]:
        """Have the next request strike here, and in this way. Return its path and body."""
        self._number += 1
        seed, tokens = _SEED + self._number, (300 + self._number % 97, 400 + self._number % 89)
        of_adapter = [LORA] if BY_NAME[place].body == "adapter" else []
        marks = [str(seed), ", ".join(map(str, tokens * 2)), *of_adapter]
        self.prompts = [f"hello {seed}", marks[1]]
        (self._folder / "ids").write_text("")
        armed = self._folder / "armed.new"
        armed.write_text(json.dumps({"place": place, "way": way, "marks": marks}))
        armed.rename(self._folder / "armed")
        path, body = request_of(BY_NAME[place], seed, tokens)
        return path, {"model": model, **body}

    def disarm(self) -> None:
        (self._folder / "armed").unlink(missing_ok=True)


def request_of(place: Place, seed: int, tokens: tuple[int, int]) -> tuple[str, dict[str, Any]]:
    """Return the path and body of a request that comes to the place."""
    body: dict[str, Any] = {"seed": seed, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    as_tokens = body | {"prompt": [*tokens * 40], "return_token_ids": True}
    as_chat = body | {"messages": [{"role": "user", "content": f"hello {seed}"}]}
    completions, chat = "/v1/completions", "/v1/chat/completions"
    match place.body:
        case "chat":
            return chat, as_chat
        case "text":
            return completions, body | {"prompt": f"hello {seed}"}
        case "stream" | "leaves":
            return chat, as_chat | {"stream": True}
        case "stop":
            return chat, as_chat | {"stop": ["never said"]}
        case "tools":
            return chat, as_chat | {"tools": [_TOOL]}
        case "logprobs":
            return completions, as_tokens | {"logprobs": 2}
        case "grammar":
            return completions, as_tokens | {"guided_regex": f"[a-z {seed}]+", "ignore_eos": False}
        case "adapter":
            return completions, as_tokens | {"model": LORA}
        case "long":
            return completions, as_tokens | {"prompt": [*tokens * 350]}
        case "flex":
            return completions, as_tokens | {"prompt": [*tokens * 80], "service_tier": "flex"}
    return completions, as_tokens


@dataclass
class Row:
    """What one trial has shown. `said` is what the poison's client got."""

    topology: str
    place: str
    way: str
    said: str = ""
    strikes: int = 0
    deaths: list[str] = field(default_factory=list)  # the parts, in the order of their ends
    broken: int = 0  # connections of innocents, which they repeated
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class Trials:
    """Trials on one deployment, one after the other. One that has ended, or does not come back, is followed."""

    def __init__(self, topology: str, folder: Path, logs: Path) -> None:
        """`folder` is for the poison; `logs` gets the log of each trial that has a problem."""
        self._topology, self._folder, self._logs = topology, folder, logs
        self.poison = Poison(folder)
        parted = () if "colocated" in topology else ("--set", "schedule.helps=false")  # so KV leaves prefill workers
        direct = ("--transport", "collective") if topology in DIRECT else ()
        self._flags = ("--lora", f"{LORA}={make_adapter(MODEL, folder / LORA, seed=1)}", *parted, *direct)
        self._flags += ("--set", "launch.still_s=6", "--max-step-tokens", "512")
        self._deaths_before: list[str] = []

    @contextmanager
    def deployed(self) -> Iterator[Deployment]:
        with deployed(*self._flags, topology=self._topology, plant=self.poison.plant) as deployment:
            wait_until(lambda: deployment.is_ready, BACK_S, deployment.log)
            yield deployment

    def run(self, deployment: Deployment, place: Place, way: str) -> Row:
        """Try one kind of poison."""
        row = Row(self._topology, place.name, way)
        if set(map(_role, self._deaths_before)) & {place.ends, "worker" if place.ends == "worker" else ""}:
            time.sleep(REST_S)  # a part that ends at once again and again has to wait longer and longer
        log_at, strikes, began = len(deployment.whole_log()), self.poison.num_strikes, time.monotonic()
        hung_s = place.limit_s if way in HANGS else 0.0
        try:
            attack = self._attack(deployment, place, way, row)
            asyncio.run(asyncio.wait_for(attack, STUCK_S + MOST_DEATHS * hung_s))
        except (asyncio.TimeoutError, AssertionError, httpx.HTTPError) as error:
            row.problems.append(f"{type(error).__name__}: {str(error)[:300]}")
        row.strikes = self.poison.num_strikes - strikes
        self.poison.disarm()
        if way in HANGS and place.ends in ("worker", "router", "pool"):  # its answer may have come first
            with suppress(AssertionError):
                hung = self.poison.struck
                wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in hung), HUNG_S + hung_s)
        if deployment.process.poll() is not None:
            row.problems.append("the deployment has ended")
        else:
            time.sleep(1.0)  # the last words of a part come before its end
            with suppress(AssertionError):
                wait_until(lambda: deployment.is_ready, BACK_S)
            if not deployment.is_ready:
                row.problems.append("the deployment does not come back")
        if shown := [prompt for prompt in self.poison.prompts if prompt in deployment.whole_log()[log_at:]]:
            row.problems.append(f"the log shows its prompt: {shown}")
        row.seconds = round(time.monotonic() - began, 1)
        row.deaths = [part for part, _ in _ENDED.findall(deployment.whole_log()[log_at:])]
        if len(row.deaths) > MOST_DEATHS:
            row.problems.append(f"{len(row.deaths)} deaths")
        if row.problems:
            name = re.sub(r"\W+", "-", f"{row.topology} {row.place} {row.way}")
            (self._logs / f"{name}.log").write_text(deployment.whole_log()[log_at:])
        self._deaths_before = row.deaths
        return row

    def is_reached(self, deployment: Deployment, place: Place) -> bool:
        """Return whether a request comes to the place. The last words about a request come after the answer."""
        strikes, (path, body) = self.poison.num_strikes, self.poison.arm(place.name, SEEN)
        asyncio.run(self._ask(deployment, place, path, body))
        with suppress(AssertionError):
            wait_until(lambda: self.poison.num_strikes > strikes, SEEN_S)
        self.poison.disarm()
        return self.poison.num_strikes > strikes

    async def _ask(self, deployment: Deployment, place: Place, path: str, body: dict[str, Any]) -> str:
        if place.body == "line":
            return await asyncio.to_thread(_said_of_line, deployment, path, body, self._folder)
        async with client(deployment.url) as http:
            return await _said(http, path, body, place.body == "leaves")

    async def _attack(self, deployment: Deployment, place: Place, way: str, row: Row) -> None:
        wanted = mixed(INNOCENTS, seed=11, prompts=(20, 60), outputs=(60, 90))
        served = deployment.metric("generation_tokens_total")
        async with client(deployment.url) as http:
            innocents = [asyncio.create_task(_patient(http, request, row)) for request in wanted]
            while await asyncio.to_thread(deployment.metric, "generation_tokens_total") < served + INNOCENTS:
                await asyncio.sleep(0.02)
            row.said = await self._ask(deployment, place, *self.poison.arm(place.name, way))
            outputs = await asyncio.gather(*innocents)
        check_greedy(wanted, outputs)


async def _patient(http: httpx.AsyncClient, request: Wanted, row: Row) -> list[int]:
    """Ask again where the connection breaks: so a client may where the gateway that it holds has died."""
    for repeat in range(MOST_REPEATS):
        try:
            return await tokens_of(http, request)
        except httpx.TransportError:
            row.broken += 1
            await asyncio.sleep(0.5 * (repeat + 1))
    raise AssertionError("an innocent request gets no answer")


async def _said(http: httpx.AsyncClient, path: str, body: Mapping[str, Any], leaves: bool) -> str:
    """Return what the client is told: a status with a code, or that the connection broke."""
    try:
        if not body.get("stream"):
            answer = await http.post(path, json=body)
            return f"{answer.status_code}{_code(answer.text)}"
        async with http.stream("POST", path, json=body) as answer:
            lines = list[str]()
            async for line in answer.aiter_lines():
                lines.append(line)
                if leaves and len(lines) > 6:
                    return "left"
            whole = "\n".join(lines)
            is_whole = answer.status_code != 200 or "data: [DONE]" in whole
            return f"{answer.status_code}{_code(whole)}" + ("" if is_whole else " cut off")
    except httpx.TransportError as error:
        return f"broken ({type(error).__name__})"


def _code(text: str) -> str:
    found = re.search(r'"code": ?"(\w+)"', text)
    return f" {found[1]}" if found else ""


def _said_of_line(deployment: Deployment, path: str, body: Mapping[str, Any], folder: Path) -> str:
    """Have the request run as the middle one of three lines of a batch; return what its line says, where the other two
    are answered."""
    others = {key: value for key, value in body.items() if key != "seed"} | {"prompt": [5, 6, 7]}
    rows = [("before", others), ("poison", body), ("after", others)]
    lines, out = folder / "lines.jsonl", folder / "out.jsonl"
    asked = [{"custom_id": name, "method": "POST", "url": path, "body": each} for name, each in rows]
    lines.write_text("".join(json.dumps(line) + "\n" for line in asked))
    faulty = folder / "out.errors.jsonl"
    for written in (out, faulty):
        written.write_text("")
    id = command("batch", "submit", lines, "--url", f"{deployment.url}/v1").stdout.split()[0]
    until = time.monotonic() + 0.9 * STUCK_S
    while command("batch", "status", id, "--url", f"{deployment.url}/v1").stdout.split()[1].rstrip(",:") not in ENDED:
        assert time.monotonic() < until, "the batch does not end"
        time.sleep(0.5)
    done = command("batch", "download", id, out, "--url", f"{deployment.url}/v1")
    answered = (out.read_text() + faulty.read_text()).splitlines()
    said = {row["custom_id"]: row for row in map(json.loads, answered)}
    assert said.keys() == {"before", "poison", "after"}, done.stderr
    assert all(said[name]["response"]["status_code"] == 200 for name in ("before", "after")), said
    told = said["poison"]
    if told.get("error"):
        return f"error {told['error']['code']}"
    return f"{told['response']['status_code']}{_code(json.dumps(told['response']['body']))}"


def _role(part: str) -> str:
    role = part.partition("-")[0]
    return "worker" if role in ("decode", "prefill") else role
