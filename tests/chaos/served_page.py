"""Pages that processes on this machine serve."""

import urllib.error
import urllib.request


def page_of(port: int, path: str) -> tuple[int, str]:
    """Status and text of an answer; 0 while there is none."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""
