"""A real DDTREE server under a bounded load of mixed requests, with SGLang's own memory checks on.

``python benchmarks/ddtree_server.py OUT SECONDS [triton|hybrid]...`` on a host with SGLang, the
overlay applied to it, and a Hopper GPU; writes OUT/ddtree-server.json. Each named server runs with
CUDA graphs and strict memory checks in every step; clients send /generate and
/v1/chat/completions, streaming or not, with shared prefixes, stop strings, logit bias, broken-off
streams, and requests that must be refused. Afterwards the server has to be idle, whole and healthy:
a leak ends an SGLang server.

The model has random weights, and so would accept next to nothing: a prompt that was answered before
has its answer among the drafts when it comes again.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

CLIENTS = 12
READY_SECONDS = 240
TREES = {"hybrid": 64, "triton": 32}


# --- inside the server


def register() -> None:
    """Give the server's models their weights and its drafter a memory (an SGLang plugin)."""
    import sglang.srt.model_loader.loader as loader
    from sglang_overlay.srt.ddtree.worker import DraftTreeWorker

    from tests.support.engine import drafts, weights

    loader.initialize_dummy_weights = weights.fill
    stock = DraftTreeWorker.plant
    answers: dict[tuple[int, ...], list[int]] = {}
    turn = 0

    def plant(worker: Any, batch: Any, chain: Any) -> Any:
        nonlocal turn
        turn += 1
        requests = len(batch.reqs)
        candidates = worker._candidates.view(requests, worker.block_size - 1, -1).cpu()
        for row, request in enumerate(batch.reqs):
            given = answers.get(tuple(request.origin_input_ids), [])
            drafts.place(candidates[row], given[len(request.output_ids) :], turn + row)
            if len(request.output_ids) >= len(given):
                answers[tuple(request.origin_input_ids)] = list(request.output_ids)
        worker._candidates.copy_(candidates.view(worker._candidates.shape))
        worker._log_probs.copy_(drafts.marginals(candidates.shape[-1]))
        chain.draft_token.view(requests, -1)[:, 1:] = candidates[:, :, 0]
        return stock(worker, batch, chain)

    worker_class: Any = DraftTreeWorker
    worker_class.plant = plant


# --- the server from outside


class Server:
    """One server process, its log and its address."""

    def __init__(self, way: str, out: Path, scratch: Path, port: int) -> None:
        self.way, self.url = way, f"http://127.0.0.1:{port}"
        self.log = out / f"server-{way}.log"
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(
                [str(write_plugin(scratch)), str(ROOT), os.environ.get("PYTHONPATH", "")]
            ),
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command(way, scratch / way, port), env=environment, stdout=log, stderr=log
            )

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the open answer to ``body``."""
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=120)

    def get(self, path: str) -> str:
        """Return the body of ``path``."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return str(answer.read().decode())

    def wait_until_ready(self) -> None:
        """Return once the server generates."""
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                self.get("/health_generate")
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
            else:
                return
        raise SystemExit(f"{self.way}: not ready; see {self.log}")


def command(way: str, folder: Path, port: int) -> list[str]:
    """Return the server's command line; writes its models and tokenizer below ``folder``."""
    from benchmarks import verify_engine_gpu as engine

    arguments = engine.server_arguments(way, folder)
    write_tokenizer(folder / "target", engine.VOCABULARY)
    arguments |= {
        "speculative_algorithm": "DDTREE",
        "speculative_num_draft_tokens": TREES[way],
        "context_length": 8192,
        "max_running_requests": 8,
        "max_total_tokens": 24_000,
        "cuda_graph_max_bs": 8,
        "host": "127.0.0.1",
        "port": port,
    }
    for name in ("skip_tokenizer_init", "cuda_graph_bs"):
        arguments.pop(name)
    line = [sys.executable, "-m", "sglang.launch_server"]
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        line += [flag] if value is True else [flag, str(value)]
    return line


def write_plugin(scratch: Path) -> Path:
    """Write a distribution whose entry point is `register`; return the folder that holds it."""
    info = scratch / "plugin" / "ddtree_load-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ddtree-load\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nddtree_load = benchmarks.ddtree_server:register\n"
    )
    return info.parent


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer of the words w0, w1, …: the ids themselves; w1 ends a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{token}": token for token in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="w0",
        eos_token="w1",
        chat_template="{% for message in messages %}{{ message['content'] }} {% endfor %}",
    ).save_pretrained(folder)


# --- the load


def prompts() -> list[str]:
    """Return 16 texts, half of them behind one head."""
    words = random.Random(0)

    def text(count: int) -> str:
        return " ".join(f"w{words.randrange(2, 4000)}" for _ in range(count))

    head = text(300)
    return [text(words.randrange(5, 900)) for _ in range(8)] + [
        f"{head} {text(words.randrange(1, 200))}" for _ in range(8)
    ]


class Load:
    """Clients that send mixed requests until told to stop, and what they got."""

    def __init__(self, server: Server, seconds: float) -> None:
        self.server = server
        self.deadline = time.monotonic() + seconds
        self.counts: Counter[str] = Counter()
        self.tokens = 0
        self.faults: list[str] = []
        self._lock = threading.Lock()
        self._texts = prompts()

    def run(self) -> None:
        """Run the clients to their end."""
        clients = [threading.Thread(target=self._client, args=(each,)) for each in range(CLIENTS)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()

    def _client(self, number: int) -> None:
        choices = random.Random(number)
        kinds = [
            self._generate,
            self._stream,
            self._chat,
            self._chat_stream,
            self._stop_string,
            self._broken_off,
            self._biased,
            self._refused,
        ]
        while time.monotonic() < self.deadline and len(self.faults) < 20:
            kind = choices.choice(kinds)
            try:
                tokens = kind(choices)
            except Exception as error:  # noqa: BLE001  whatever it was, it is told
                with self._lock:
                    self.faults.append(f"{kind.__name__}: {error!r}"[:300])
                time.sleep(0.2)
                continue
            with self._lock:
                self.counts[kind.__name__.strip("_")] += 1
                self.tokens += tokens

    def _order(self, choices: random.Random, **sampling: Any) -> dict[str, Any]:
        limits = {"temperature": 0, "max_new_tokens": choices.choice([1, 17, 60, 200])}
        return {"text": choices.choice(self._texts), "sampling_params": limits | sampling}

    def _generate(self, choices: random.Random, **sampling: Any) -> int:
        with self.server.post("/generate", self._order(choices, **sampling)) as answer:
            info = json.loads(answer.read())["meta_info"]
        _expect(info["finish_reason"]["type"] in ("length", "stop"), info["finish_reason"])
        return int(info["completion_tokens"])

    def _stop_string(self, choices: random.Random) -> int:
        return self._generate(choices, stop=[f"w{choices.randrange(10)}", " w77"])

    def _biased(self, choices: random.Random) -> int:
        """Forbid some tokens, and push one."""
        bias = {str(token): -100.0 for token in range(2, 400)} | {"3000": 2.0}
        return self._generate(choices, logit_bias=bias)

    def _stream(self, choices: random.Random, *, events: int | None = None) -> int:
        order = self._order(choices) | {"stream": True}
        tokens = 0
        with self.server.post("/generate", order) as answer:
            for number, event in enumerate(_events(answer)):
                tokens = int(event["meta_info"]["completion_tokens"])
                if number == events:
                    return tokens
        _expect(tokens > 0, "a stream without tokens")
        return tokens

    def _broken_off(self, choices: random.Random) -> int:
        return self._stream(choices, events=choices.randrange(3))

    def _chat_order(self, choices: random.Random) -> dict[str, Any]:
        return {
            "model": "default",
            "messages": [{"role": "user", "content": choices.choice(self._texts)}],
            "temperature": 0,
            "max_tokens": choices.choice([1, 30, 100]),
        }

    def _chat(self, choices: random.Random) -> int:
        with self.server.post("/v1/chat/completions", self._chat_order(choices)) as answer:
            found = json.loads(answer.read())
        _expect(found["choices"][0]["finish_reason"] in ("length", "stop"), found)
        return int(found["usage"]["completion_tokens"])

    def _chat_stream(self, choices: random.Random) -> int:
        order = self._chat_order(choices) | {"stream": True}
        with self.server.post("/v1/chat/completions", order) as answer:
            reasons = [
                event["choices"][0]["finish_reason"]
                for event in _events(answer)
                if event["choices"]
            ]
        _expect(reasons[-1] in ("length", "stop"), reasons)
        return 0

    def _refused(self, choices: random.Random) -> int:
        order = self._order(choices)
        if choices.random() < 0.5:
            order["return_logprob"] = True
        else:
            order["sampling_params"]["frequency_penalty"] = 0.5
        try:
            with self.server.post("/generate", order) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            text = error.read().decode()
        _expect("DDTREE speculative decoding does not support" in text, text)
        return 0


def _events(answer: Any) -> Any:
    for line in answer:
        if line.startswith(b"data: ") and b"[DONE]" not in line:
            yield json.loads(line[6:])


def _expect(holds: bool, what: Any) -> None:
    if not holds:
        raise ValueError(f"unexpected: {what}"[:300])


def measure(server: Server, seconds: float) -> dict[str, Any]:
    """Put the load on ``server``, let it come to rest, and return what is left."""
    server.wait_until_ready()
    load = Load(server, seconds)
    began = time.monotonic()
    load.run()
    spent = time.monotonic() - began
    time.sleep(3)
    (state,) = json.loads(server.get("/server_info"))["internal_states"]
    server.get("/health_generate")
    text = server.log.read_text(errors="replace")
    return {
        "seconds": round(spent, 1),
        "requests": dict(load.counts),
        "tokens": load.tokens,
        "tokens_per_second": round(load.tokens / spent, 1),
        "faults": load.faults,
        "alive": server.process.poll() is None,
        "leak_lines": [line for line in text.splitlines() if "leak" in line.lower()],
        "tracebacks": text.count("Traceback"),
        "overlay": state["overlay"],
    }


def main(out: Path, seconds: float, ways: list[str]) -> int:
    """Run the servers side by side; return 1 when something about one of them is wrong."""
    out.mkdir(parents=True, exist_ok=True)
    scratch = Path(os.environ.get("TMPDIR", "/tmp")) / f"ddtree-server-{os.getpid()}"
    scratch.mkdir()
    servers = [Server(way, out, scratch, 30100 + 100 * at) for at, way in enumerate(ways)]
    found: dict[str, Any] = {}
    threads = [
        threading.Thread(target=lambda own=own: found.update({own.way: measure(own, seconds)}))
        for own in servers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for server in servers:
        server.process.kill()
    text = json.dumps(found, indent=1)
    (out / "ddtree-server.json").write_text(text + "\n")
    print(text)
    sound = [
        each["alive"] and not (each["faults"] or each["leak_lines"]) for each in found.values()
    ]
    return int(len(sound) < len(servers) or not all(sound))


if __name__ == "__main__":
    code = main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:] or ["hybrid", "triton"])
    # Requests that never came back must not hold this process.
    os._exit(code)
