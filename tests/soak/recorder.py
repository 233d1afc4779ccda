"""A scheduler that writes down what vLLM's drafter proposes, and after which tokens. Loaded by a server (`--scheduler-cls`)."""

import json
import os
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class RecordingScheduler(Scheduler):  # type: ignore[misc]  # vLLM ships no types
    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        super().update_draft_token_ids(draft_token_ids)
        with open(os.environ["DRAFTS"], "a") as file:
            for name, drafted in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
                if (request := self.requests.get(name)) and drafted:
                    file.write(json.dumps([list(request.all_token_ids), list(drafted)]) + "\n")
