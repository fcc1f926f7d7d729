"""Which function answers which request. What is not here is answered 501, and fails the test."""

from __future__ import annotations

from collections.abc import Callable

from hub_emulator import account, buckets, cas, commits, job_routes, repos
from hub_emulator.wire import Answer, Call

ANYONE = "anyone"  # a token is looked at when there is one
ACCOUNT = "account"  # a token of this server, else 401
KEY = "key"  # the route looks at a key of its own

_NAME = r"(?P<name>[^/]+/[^/]+)"
_KIND = r"(?P<kind>models|datasets)"
_PAGE = r"(?P<kind>datasets/)?" + _NAME  # of a repository, as its address begins
_REVISION = r"(?P<revision>[^/]+)"
_BUCKET = r"(?P<id>[^/]+/[^/]+)"
_JOBS = r"/api/jobs/(?P<namespace>[^/]+)"
_JOB = _JOBS + r"/(?P<id>[0-9a-f]{24})"
_STORE = r"/cas(?:-own|/[0-9a-f]{8})"
_HASH = r"(?P<hash>[0-9a-f]{64})"

ROUTES: list[tuple[str, str, str, Callable[[Call], Answer]]] = [
    ("GET", r"/api/agent-harnesses", ANYONE, account.harnesses),
    ("GET", r"/api/whoami-v2", ACCOUNT, account.whoami),
    # Models and datasets
    ("POST", r"/api/repos/create", ACCOUNT, commits.create),
    ("DELETE", r"/api/repos/delete", ACCOUNT, commits.delete),
    ("POST", r"/api/validate-yaml", ANYONE, commits.validate_card),
    ("GET", rf"/api/{_KIND}/{_NAME}", ANYONE, repos.info),
    ("GET", rf"/api/{_KIND}/{_NAME}/revision/{_REVISION}", ANYONE, repos.info),
    ("GET", rf"/api/{_KIND}/{_NAME}/auth-check(?P<write>/write)?", ANYONE, repos.auth_check),
    ("GET", rf"/api/{_KIND}/{_NAME}/tree/{_REVISION}(?P<path>.*)", ANYONE, repos.tree),
    ("POST", rf"/api/{_KIND}/{_NAME}/paths-info/{_REVISION}", ANYONE, repos.paths_info),
    ("GET", rf"/api/{_KIND}/{_NAME}/commits/{_REVISION}", ANYONE, repos.commits),
    ("GET", rf"/api/{_KIND}/{_NAME}/refs", ANYONE, repos.refs),
    ("GET", rf"/{_PAGE}/resolve/{_REVISION}/(?P<path>.+)", ANYONE, repos.resolve),
    ("POST", rf"/api/{_KIND}/{_NAME}/branch/{_REVISION}", ACCOUNT, commits.branch),
    ("POST", rf"/api/{_KIND}/{_NAME}/preupload/{_REVISION}", ACCOUNT, commits.preupload),
    ("POST", rf"/api/{_KIND}/{_NAME}/commit/{_REVISION}", ACCOUNT, commits.commit),
    ("GET", rf"/api/{_KIND}/{_NAME}/xet-(?P<right>read|write)-token/{_REVISION}", ACCOUNT, commits.xet_token),
    ("POST", rf"/{_PAGE}\.git/info/lfs/objects/batch", ACCOUNT, commits.lfs_batch),
    ("POST", rf"/{_PAGE}\.git/info/lfs/objects/verify", ACCOUNT, commits.lfs_verify),
    ("PUT", r"/lfs-upload/(?P<key>[0-9a-f]{32})", KEY, commits.lfs_put),
    # Buckets
    ("GET", rf"/api/buckets/{_BUCKET}/tree(?P<path>/.*)?", ACCOUNT, buckets.tree),
    ("POST", rf"/api/buckets/{_BUCKET}/paths-info", ACCOUNT, buckets.paths_info),
    ("POST", rf"/api/buckets/{_BUCKET}/batch", ACCOUNT, buckets.batch),
    ("GET", rf"/api/buckets/{_BUCKET}/xet-(?P<right>read|write)-token", ACCOUNT, buckets.token),
    ("GET", rf"/buckets/{_BUCKET}/resolve/(?P<path>.+)", ACCOUNT, buckets.resolve),
    ("POST", rf"/api/buckets/{_BUCKET}", ACCOUNT, buckets.create),
    ("GET", rf"/api/buckets/{_BUCKET}", ACCOUNT, buckets.info),
    ("DELETE", rf"/api/buckets/{_BUCKET}", ACCOUNT, buckets.delete),
    ("GET", r"/api/buckets/(?P<namespace>[^/]+)", ACCOUNT, buckets.mine),
    # The Xet store
    ("GET", rf"{_STORE}/v1/chunks/default/{_HASH}", KEY, cas.nothing_newer),
    ("POST", rf"{_STORE}/v1/xorb-grants/default/{_HASH}", KEY, cas.nothing_newer),
    ("POST", rf"{_STORE}/v2/shards", KEY, cas.nothing_newer),
    ("GET", rf"{_STORE}/v2/reconstructions/{_HASH}", KEY, cas.nothing_newer),
    ("POST", rf"{_STORE}/v1/xorbs/default/{_HASH}", KEY, cas.put_xorb),
    ("POST", rf"{_STORE}/v1/shards", KEY, cas.put_shard),
    ("GET", rf"{_STORE}/v1/reconstructions/{_HASH}", KEY, cas.reconstruction),
    ("GET", rf"{_STORE}/xorbs/{_HASH}", KEY, cas.xorb),
    ("POST", r"/v1/telemetry", KEY, cas.telemetry),
    # Jobs
    ("GET", r"/api/jobs/hardware", ANYONE, job_routes.hardware),
    ("POST", _JOBS, ACCOUNT, job_routes.create),
    ("GET", _JOBS, ACCOUNT, job_routes.listed),
    ("GET", _JOB, ACCOUNT, job_routes.inspect),
    ("POST", rf"{_JOB}/cancel", ACCOUNT, job_routes.cancel),
    ("POST", rf"{_JOB}/duplicate", ACCOUNT, job_routes.duplicate),
    ("PUT", rf"{_JOB}/labels", ACCOUNT, job_routes.labels),
    ("GET", rf"{_JOB}/logs", ACCOUNT, job_routes.logs),
    ("GET", rf"{_JOB}/metrics", ACCOUNT, job_routes.metrics),
]
