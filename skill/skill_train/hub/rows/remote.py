"""Reads parts of a dataset's files on the Hub, up to a limit of bytes."""

import io
from dataclasses import dataclass

from skill_train.core.errors import UsageError
from skill_train.hub.client import REQUEST_SECONDS


@dataclass(frozen=True)
class SplitFiles:
    """The files of one split, with their sizes in bytes."""

    dataset: str
    commit: str  # the commit of the dataset
    revision: str  # the revision with the files: `commit`, or the Hub's Parquet copy
    names: list[str]
    sizes: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.sizes[name] for name in self.names)

    @property
    def parquet(self) -> bool:
        return self.names[0].endswith(".parquet")


class ByteBudget:
    """Reads parts of files until a limit of bytes is reached."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.read_bytes = 0

    def read(self, files: SplitFiles, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Reads bytes of a file. `length` None reads up to its end.

        Raises:
            UsageError: the limit is exceeded, because the first rows are too large.
        """
        size = files.sizes[name] - start if length is None else length
        self.read_bytes += size
        if self.read_bytes > self.most:
            raise UsageError(
                f"the first rows of {files.dataset} are too large to inspect",
                code="unreadable_dataset",
                expected=f"complete rows within the first {self.most // 10**6} MB",
                hint="download the dataset and use the local file",
            )
        return _range_of(files, name, start, size) if size > 0 else b""


def _range_of(files: SplitFiles, name: str, start: int, length: int) -> bytes:
    """One range of a file. If a server sends the whole file instead, only the range is read.

    Raises:
        OSError: another part of the file arrived, in the client's own words, which become a Temporary.
    """
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    url = hf_hub_url(files.dataset, name, repo_type="dataset", revision=files.revision)
    headers = {**build_hf_headers(), "Range": f"bytes={start}-{start + length - 1}", "Accept-Encoding": "identity"}
    with get_session().stream("GET", url, headers=headers, timeout=REQUEST_SECONDS) as response:
        if response.is_error:
            response.read()
        hf_raise_for_status(response)
        skip = start if response.status_code == 200 else 0
        part = response.headers.get("Content-Range", f"bytes {start - skip}-")
        data = bytearray()
        for piece in response.iter_bytes():
            data += piece
            if len(data) >= skip + length:
                break
    if len(data) < skip + length or not part.startswith(f"bytes {start - skip}-"):
        raise OSError(f"Consistency check failed: {length} bytes from {start} on were requested; {len(data)}, {part}")
    return bytes(data[skip : skip + length])


class RemoteFile(io.RawIOBase):
    """A file on the Hub in which pyarrow can seek. Each read is one request."""

    def __init__(self, files: SplitFiles, name: str, budget: ByteBudget) -> None:
        super().__init__()
        self._files, self._name, self._budget = files, name, budget
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._files.sizes[self._name]}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        rest = max(0, self._files.sizes[self._name] - self._at)
        length = rest if size is None or size < 0 else min(size, rest)
        data = self._budget.read(self._files, self._name, self._at, length)
        self._at += len(data)
        return data
