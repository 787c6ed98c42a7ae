"""What can be asked of an engine: an asynchronous HTTP client of one SGLang server and our plugin in it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx
from pydantic import TypeAdapter

from fp8rl.models.formats import Sighting
from fp8rl.models.sizes import ModelSizes
from fp8rl.numerics.core.memory import Holding
from fp8rl.rollout.engine import protocol
from fp8rl.rollout.engine.protocol import RELEASED, from_checksums, to_action
from fp8rl.rollout.engine.server.answers import parse_completion, parse_prompt_logprobs
from fp8rl.rollout.types import IDLE_S, Completion, Endpoint, EngineError, Group, SamplingParams, Trajectory

PauseMode = Literal["abort", "retract", "in_place"]
Answer = TypeVar("Answer")

SCORED_SHORT_OF = 6
"""A prompt to score has at most context length - SCORED_SHORT_OF tokens (SGLang 0.5.19)."""
_MOST_ABORTS = 1000
"""Largest number of aborts of one answer. Without a limit, the caller of a faulty engine could wait for ever."""
_NOTHING = Completion([], [], [], finished=False, aborted=True)
"""An answer that has not been requested yet."""


@dataclass(frozen=True)
class Slept:
    """Bytes that a sleeping engine has released, and bytes that it still has. Each is the largest of all its ranks."""

    released: int
    """Bytes of weights and KV cache that were released. CUDA graphs are also released, but not counted."""
    behind: int
    """Bytes that are still in use (`rollout.engine.protocol.Memory.in_use`)."""


class EngineClient:
    """A client with one key for generation and another for administration. Use it only in one event loop."""

    def __init__(self, endpoint: Endpoint, timeout_s: float = 3600.0, routes: ModelSizes | None = None) -> None:
        """timeout_s: timeout of all requests except generation. routes: request the experts of every token of a model
        of these sizes. The server must have been started with routes."""
        # An answer takes as long as it takes. Whoever owns the engine notices if it hangs.
        self._generation_timeout = httpx.Timeout(timeout_s, connect=5.0, read=None)
        self._client = httpx.AsyncClient(
            base_url=endpoint.url,
            timeout=httpx.Timeout(timeout_s, connect=5.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=16, keepalive_expiry=IDLE_S),
            trust_env=False,
            verify=endpoint.url.startswith("https:"),  # reading the system's certificates takes 25 ms and more
        )
        self.endpoint, self.url, self.ranks = endpoint, endpoint.url, endpoint.ranks
        self._routes = routes

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.aclose()

    @property
    def seen_from(self) -> str:
        """The address at which the engine's machine reaches this machine."""
        url = httpx.URL(self.url)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((url.host, url.port))  # which sends nothing
            return str(probe.getsockname()[0])

    async def generate(self, groups: Sequence[Group], sampling: SamplingParams) -> list[Trajectory]:
        """Sample all groups. Answers are in the order of the groups; `Trajectory.group` is the index of a group.

        An answer that a pause has aborted continues after its last token, with the same seed and the rest of its
        tokens. Each token has the version of the weights that sampled it.
        """
        asked = [(group.prompt.token_ids, seed, index) for index, group in enumerate(groups) for seed in group.seeds]
        answers = [_NOTHING for _ in asked]
        for _ in range(_MOST_ABORTS):
            aborted = [row for row, answer in enumerate(answers) if answer.aborted]
            if not aborted:
                break
            completions = await self.complete(
                [asked[row][0] + answers[row].token_ids for row in aborted],
                sampling,
                [asked[row][1] for row in aborted],
                [len(answers[row].token_ids) for row in aborted],
            )
            for row, completion in zip(aborted, completions, strict=True):
                answers[row] = answers[row].then(completion)
        else:
            raise EngineError(f"found answers that the engine aborted {_MOST_ABORTS} times, expected it to finish them")
        return [
            Trajectory(
                prompt_ids=prompt_ids,
                token_ids=answer.token_ids,
                logprobs=answer.logprobs,
                finished=answer.finished,
                weight_versions=answer.weight_versions,
                group=group,
                seed=seed,
                routed_experts=answer.routed_experts,
                supports=answer.supports,
            )
            for (prompt_ids, seed, group), answer in zip(asked, answers, strict=True)
        ]

    async def complete(
        self,
        input_ids: list[list[int]],
        sampling: SamplingParams,
        seeds: Sequence[int] | None = None,
        spent: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Sample one answer for each row of `input_ids`, in order, in one request.

        seeds: one for each answer. spent: for each row, how many of its last tokens count as part of the answer.

        One request for all answers is about four times as fast as one for each answer (7,200 against 1,700 tokens per
        second for 256 answers of 15 tokens).
        """
        if not input_ids:
            return []
        each = [
            sampling.to_request(None if seeds is None else seeds[row], 0 if spent is None else spent[row])
            for row in range(len(input_ids))
        ]
        asked: dict[str, Any] = {} if self._routes is None else {"return_routed_experts": True}
        asked |= {"return_sampling_mask": True} if sampling.supports else {}
        asked |= {"top_logprobs_num": sampling.likeliest} if sampling.likeliest else {}
        answers = await self._post_generation(input_ids, each, **asked)
        return [parse_completion(answer, self._routes, sampling) for answer in answers]

    async def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Return the log-probabilities of each sequence's tokens from index 1 on, with the loaded weights, at
        temperature 1.

        The server computes them by prefill, in its usual chunks, and reuses no cached prefix. SGLang 0.5.19 applies no
        temperature to the log-probabilities of a prompt. A prompt must be at least `SCORED_SHORT_OF` tokens shorter
        than the context. A value that is not finite is NaN, as in `complete`.
        """
        if not sequences:
            return []
        one_token = SamplingParams(max_new_tokens=1, temperature=0.0)
        answers = await self._post_generation(sequences, one_token.to_request(), logprob_start_len=0)
        return [parse_prompt_logprobs(answer, len(ids)) for answer, ids in zip(answers, sequences, strict=True)]

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stop generation. New requests wait. The mode says what running requests do.

        `retract`: they go back to the queue, and their prefix is prefilled again. `abort`: they end as they are.
        `in_place`: they keep their KV cache, so tokens after an update come from a mixture of weights.
        An update does not flush the cache. Call `flush` when everything is sent, except after `in_place`.
        """
        await self.admin("/pause_generation", mode=mode)

    async def resume(self) -> None:
        """End a pause."""
        await self.admin("/continue_generation")

    async def occupy(self, *tags: str) -> None:
        """Allocate released memory again, without its contents. Memory that was not released does not change."""
        await self.admin("/resume_memory_occupation", tags=list(tags))

    async def sleep(self) -> Slept:
        """Release weights, KV cache and CUDA graphs, whose contents are lost. Unfinished answers wait. A sync wakes the
        engine."""
        await self.pause("retract")
        before = await self.memory()
        await self.admin("/release_memory_occupation", tags=list(RELEASED))
        after = await self.memory()
        given = (b.weights + b.kv_cache - a.weights - a.kv_cache for b, a in zip(before, after, strict=True))
        return Slept(max(given), max(rank.in_use for rank in after))

    async def flush(self) -> None:
        """Forget every cached prefix. Fails while a request runs."""
        await self.admin("/flush_cache")

    async def load_bucket(self, addresses: Sequence[str], tensors: Sequence[tuple[Any, ...]]) -> None:
        """Load tensors from memory, whose address (`numerics.core.memory`) each rank has of its own. Afterwards it may
        be overwritten. tensors: (HF name, torch's name of the dtype, shape, offset in bytes) of each."""
        await self._ask_plugin("load_bucket", addresses=addresses, tensors=tensors)

    async def receive_bucket(self, group: str, size: int, tensors: Sequence[tuple[Any, ...]]) -> None:
        """Load tensors from `size` bytes that rank 0 of a group broadcasts (`join_weights_group`, `load_bucket`)."""
        await self._ask_plugin("receive_bucket", group=group, size=size, tensors=tensors)

    async def update_weights_from_disk(self, model_path: str | Path) -> None:
        """Load a model directory. The cache (`pause`) and the version (`commit`) stay as they are."""
        # `auto` is not the format of the start, which may have been without weights.
        await self.admin("/update_weights_from_disk", model_path=str(model_path), load_format="auto", flush_cache=False)

    async def join_weights_group(
        self, name: str, address: str, port: int, rank: int, world_size: int, backend: str
    ) -> None:
        """Make the server a rank of a process group. Return when all ranks have met at `address`:`port`."""
        await self.admin(
            "/init_weights_update_group",
            group_name=name,
            master_address=address,
            master_port=port,
            rank_offset=rank,
            world_size=world_size,
            backend=backend,
        )

    async def leave_weights_group(self, name: str) -> None:
        """Undo `join_weights_group`."""
        await self.admin("/destroy_weights_update_group", group_name=name)

    async def weight_version(self) -> int:
        return int((await self._send("GET", "/model_info")).json()["weight_version"])

    async def commit(self, version: int) -> dict[str, str]:
        """Rebuild the GEMM operands of the engine's weights, and set the weights' version. Return the digests of the
        weights by HF name, or `digest@version` of a quantized weight."""
        await self.admin("/update_weight_version", new_version=str(version), abort_all_requests=False)
        return merged(await self._of_ranks(dict[str, str], "commit", version=str(version)))

    async def map_base(self, address: str) -> int:
        """Let the engine read weights at this address (`numerics.core.memory`). Return their size in bytes.

        Call `commit` before the engine computes with them.
        """
        return await self._agreed(int, "map_base", address=address)

    async def manifest(self) -> dict[str, str]:
        """Return the digests of the engine's weights, as `commit` does."""
        return merged(await self._of_ranks(dict[str, str], "manifest"))

    async def probe(self, recording: Path) -> str:
        """Run the engine's ops on the trainer's recording, a file that both sides can read. The results are in the file
        `rollout.engine.plugin.op_probe.ANSWER` in the same directory. Return the SHA-256 of this file."""
        return await self._agreed(str, "probe", recording=str(recording))

    async def formats(self, sequences: Sequence[Sequence[int]]) -> list[list[Sighting]]:
        """Return the formats of the tensors of a forward pass over these tokens, in each of the engine's ranks."""
        return await self._of_ranks(list[Sighting], "formats", sequences=sequences)

    async def report(self) -> protocol.EngineReport:
        """Return the report of the engine, which must be the same on all its ranks."""
        return await self._agreed(protocol.EngineReport, "report")

    async def inventory(self) -> list[tuple[Holding, ...]]:
        """Return for each rank of the engine the tensors that it has."""
        return await self._of_ranks(tuple[Holding, ...], "inventory")

    async def memory(self) -> list[protocol.Memory]:
        """Return for each rank of the engine the bytes that it has in use."""
        return await self._of_ranks(protocol.Memory, "memory")

    async def ping(self) -> str | None:
        """Return the scheduler's weight version. The scheduler answers also during long requests and pauses."""
        version = await self._agreed(object, "ping")
        return None if version is None else str(version)

    async def pulse(self) -> int:
        """Return the number of tokens in the KV cache, which the scheduler has last published. The HTTP server and the
        scheduler must answer for this."""
        await self.ping()
        ranks = (await self._send("GET", "/v1/loads", params={"include": "core"})).json()["loads"]
        return sum(rank["num_used_tokens"] for rank in ranks)

    async def _ask_plugin(self, call: str, **arguments: Any) -> list[str]:
        """Return the JSON answer of each rank's plugin. Raises EngineError: there is no plugin, or the call failed."""
        ranks = (await self.admin("/weights_checker", action=to_action(call, **arguments)))["ranks"]
        return [from_checksums(rank["checksums"]) for rank in ranks]

    async def _of_ranks(self, kind: type[Answer], call: str, **arguments: Any) -> list[Answer]:
        """Return the answer of each rank's plugin, parsed as `kind`. Raises EngineError as `_ask_plugin` does."""
        return [TypeAdapter(kind).validate_json(answer) for answer in await self._ask_plugin(call, **arguments)]

    async def _agreed(self, kind: type[Answer], call: str, **arguments: Any) -> Answer:
        """Return the plugin's answer, parsed as `kind`. Raises EngineError also if the answers of ranks differ."""
        answers = sorted(set(await self._ask_plugin(call, **arguments)))
        if len(answers) != 1:
            raise EngineError(f"found ranks that answer {' and '.join(answers)}, expected the same answer from all")
        return TypeAdapter(kind).validate_json(answers[0])

    async def admin(self, path: str, **body: Any) -> dict[str, Any]:
        """POST to an administration endpoint. Return its answer, or {} if the answer is no JSON object.

        Raises EngineError if the status is not 200, or if the answer has `"success": false`.
        """
        response = await self._send("POST", path, admin=True, json=body)
        answer: dict[str, Any] = response.json() if response.text.startswith("{") else {}
        if answer.get("success") is False:
            raise EngineError(f"{path} failed: {answer.get('message', answer)}")
        return answer

    async def _post_generation(
        self, input_ids: list[list[int]], sampling_params: dict[str, Any] | list[dict[str, Any]], **options: Any
    ) -> Any:
        body = {"input_ids": input_ids, "sampling_params": sampling_params, "return_logprob": True, **options}
        return (await self._send("POST", "/generate", json=body, timeout=self._generation_timeout)).json()

    async def _send(self, method: str, path: str, admin: bool = False, **options: Any) -> httpx.Response:
        """Send a request with one of the two keys. Raises EngineError: the answer's status is not 200."""
        key = self.endpoint.admin_key if admin else self.endpoint.api_key
        headers = {"Authorization": f"Bearer {key}"}
        response = await self._client.request(method, path, headers=headers, **options)
        if response.status_code == 401:
            raise EngineError(f"{path} answered 401: found a wrong key, expected this engine's key")
        if response.status_code != 200:
            raise EngineError(f"{path} answered {response.status_code}: {response.text[:2000]}")
        return response


def merged(answers: list[dict[str, str]]) -> dict[str, str]:
    """Merge the manifests of all ranks. Different digests of a tensor are joined to a text that equals no digest."""
    entries: dict[str, str] = {}
    for answer in answers:
        for name, digest in answer.items():
            known = entries.setdefault(name, digest)
            entries[name] = known if known == digest else f"{known} and {digest} on another rank"
    return entries
