"""An engine that goes on with prompts which others have computed."""

from heapq import heappush

from benchmarks.routing.engine import Engine
from benchmarks.routing.job import Job


class DecodeEngine(Engine):
    def take(self, job: Job, now: float) -> bool:
        """Whether there was a place for its KV. Its first token comes with the next step."""
        self._advance(now)
        if not self._allocate(job):
            return False
        job.first_token_at = now + self.model.decode_step_seconds
        self._decode_kv_tokens += job.num_kv_tokens
        heappush(self._decodes, (self._steps + job.num_output_tokens, job.number, job))
        self._set_speeds()
        return True
