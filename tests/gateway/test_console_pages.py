"""The console in a browser: every action, hostile texts, a lost connection, axe, keyboard, small and dark."""

import json
import math
import os
import re
import uuid
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
from chromium import chromium
from click.testing import CliRunner
from gateway_support import Served, fresh_memory, running
from playwright.sync_api import Browser, Page, expect

from kmqpy.cli.app import kmq
from kmqpy.core.clock import SYSTEM_CLOCK, wait_until
from kmqpy.gateway.console import sampler
from kmqpy.gateway.keys import keyring
from kmqpy.gateway.keys.keyring import new_key
from kmqpy.gateway.keys.stores import StorageKeys
from kmqpy.gateway.tracker_process import TrackerProcess
from kmqpy.queue import storage_for

AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text()
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
ODD = "\u202eexe.txt\u2066\u200b\x07\x1b[31m"
expect.set_options(timeout=20_000)  # a busy machine
DESK, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 800}


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(sampler, "_ROUND_S", 0.1)


@pytest.fixture
def served(tmp_path) -> Iterator[Served]:
    storage = storage_for(f"sqlite:///{tmp_path}/q.db")
    with running(storage, StorageKeys(storage)) as found:
        yield found


@pytest.fixture
def page(browser) -> Iterator[Page]:
    context = browser.new_context(viewport=DESK)
    context.set_default_timeout(20_000)
    made = context.new_page()
    wrong: list[str] = []
    made.on("pageerror", lambda error: wrong.append(str(error)))
    made.on("console", lambda said: wrong.append(said.text) if "Content Security" in said.text else None)
    yield made
    context.close()
    assert not wrong


def go(page: Page, served: Served, place: str = "#/") -> Page:
    page.goto(f"http://127.0.0.1:{served.gateway.port}/console/{place}")
    return page


def jobs(served: Served, *bodies, name="jobs", dead: int = 0, taken: int = 0, **settings) -> None:
    served.storage.create(name, **settings)
    with served.storage.open(name) as queue:
        for body in bodies:
            queue.send(body, key="k-1", headers={"from": "test"})
        if dead:
            queue.dead_letter(queue.receive(dead, wait=5), reason="no such mailbox", confirmed=True)
        if taken:
            queue.receive(taken, wait=5, lease=600)


def by_url(served: Served, *command: str) -> str:
    """What kmq prints for a command by the gateway's url."""
    done = CliRunner().invoke(kmq, ["--queue-url", served.gateway.url, *command])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def counts(served: Served):
    found = served.storage.describe("jobs")
    return found.ready, found.in_flight, found.dead


def violations(page: Page, *only: str) -> list[str]:
    if not page.evaluate("window.axe !== undefined"):
        page.evaluate(AXE)
    found = page.evaluate("only => axe.run(only.length ? {runOnly: only} : {})", [*only])
    return [f"{one['id']}: {[node['html'][:200] for node in one['nodes']]}" for one in found["violations"]]


def wide(page: Page) -> bool:
    """Whether the page itself has to be moved sideways."""
    return page.evaluate("document.documentElement.scrollWidth > innerWidth")


def test_every_action_of_a_queue(page, served):
    jobs(served, *(f"body-{i}" for i in range(6)), dead=3, taken=1)
    go(page, served)
    row = page.get_by_role("row", name=re.compile("jobs"))
    expect(row.locator("td").nth(0)).to_have_text("2")
    expect(row.locator("td").nth(5)).to_have_text("3")
    page.get_by_role("link", name="jobs").click()
    dead = page.locator("section", has=page.get_by_role("heading", name="Dead letters"))
    waiting = page.locator("section", has=page.get_by_role("heading", name="Waiting"))
    flight = page.locator("section", has=page.get_by_role("heading", name="In flight"))
    expect(dead.locator("tbody tr")).to_have_count(3)
    expect(flight.locator("tbody tr")).to_have_count(1)
    expect(dead).to_contain_text("rejected: no such mailbox")
    dead.locator("summary").first.click()
    expect(dead.locator("pre")).to_have_text("body-0")
    expect(dead.locator("details dd")).to_have_text("test")

    dead.get_by_role("checkbox").nth(1).check()
    dead.get_by_role("button", name="Redrive chosen").click()
    expect(page.get_by_role("dialog")).to_contain_text("1 dead letter goes back")
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    assert counts(served) == (2, 1, 3), "a preview does nothing"
    dead.get_by_role("button", name="Redrive chosen").click()
    page.get_by_role("dialog").get_by_role("button", name="Redrive").click()
    expect(dead.locator("tbody tr")).to_have_count(2)
    assert counts(served) == (3, 1, 2)
    dead.get_by_role("button", name="Redrive all").click()
    page.get_by_role("dialog").get_by_role("button", name="Redrive").click()
    expect(dead.locator("tbody")).to_have_text("nothing")
    assert counts(served) == (5, 1, 0)

    page.get_by_role("button", name="Send a message").click()
    page.get_by_label("Body", exact=True).fill("from a person")
    page.get_by_label("Key", exact=True).fill("person")
    page.get_by_role("dialog").get_by_role("button", name="Send").click()
    expect(waiting.locator("tbody tr")).to_have_count(6)
    page.get_by_label("Search id, key").fill("from a")
    expect(waiting.locator("tbody tr:visible")).to_have_count(1)
    waiting.locator("tbody tr:visible a").click()
    expect(page.locator("ol.life li").first).to_contain_text("sent")
    expect(page.locator("pre")).to_have_text("from a person")
    page.get_by_role("link", name="Queue jobs").click()

    page.get_by_role("button", name="Purge").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("button", name="Remove")).to_be_disabled()
    dialog.get_by_label("Type the name").fill("job")
    expect(dialog.get_by_role("button", name="Remove")).to_be_disabled()
    dialog.get_by_label("Type the name").fill("jobs")
    dialog.get_by_role("button", name="Remove").click()
    expect(page.locator("#said")).to_contain_text("removed")
    expect(waiting.locator("tbody")).to_have_text("nothing")
    assert counts(served) == (0, 0, 0)


def test_keys_are_made_and_used_and_a_reader_sees_no_bodies(page, served, monkeypatch):
    monkeypatch.setattr(keyring, "_CACHED_S", 0.0)
    jobs(served, "secret body", "dead body", dead=1)
    go(page, served, "#/keys")
    page.get_by_role("button", name="Make a key").click()
    page.get_by_label("Whose key").fill("me")
    page.get_by_label("Role").select_option("queue_admin")
    expect(page.get_by_role("dialog")).to_contain_text("This is the first key")
    page.get_by_role("button", name="Make it").click()
    secret = page.locator("#secret").inner_text()
    assert StorageKeys(served.storage).read()[0].title == "me"

    reader, reading = new_key("reader", [], ["queue|get_status|jobs"])
    StorageKeys(served.storage).put(reader)
    page.context.clear_cookies()
    go(page, served, "#/q/jobs")
    page.reload()
    page.get_by_label("Key").fill("wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("not valid")
    page.get_by_label("Key").fill(reading)
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator("tbody")).to_contain_text("rejected: no such mailbox")
    expect(page.locator("main")).to_contain_text("queue|poll|jobs")
    assert "body" not in page.locator("tbody").inner_text().replace("not for this key", "")
    assert not page.get_by_role("button", name=re.compile("Purge|Redrive|Send")).count()
    assert violations(page) == []
    assert page.context.cookies() == []
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("Key").fill(secret)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("button", name="Purge")).to_be_visible()
    page.get_by_role("link", name="Keys").click()
    page.get_by_role("button", name=f"Revoke {reader.id}").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    expect(page.locator("main")).not_to_contain_text(reader.id)
    assert [one.title for one in StorageKeys(served.storage).read()] == ["me"]


def test_hostile_names_bodies_reasons_and_headers_are_text(page, served):
    name = HOSTILE[:200]
    served.storage.create(name)
    with served.storage.open(name) as queue:
        queue.send(HOSTILE + ODD, key=HOSTILE, headers={HOSTILE: HOSTILE, "binary": b"\xff\xfe"})
        queue.send(b"\x00\xff" * 40)
        queue.send(HOSTILE)
        (one,) = queue.receive(1)
        queue.dead_letter(one, reason=HOSTILE + ODD)
        (one,) = queue.receive(1, lease=600)
    go(page, served)
    page.get_by_role("link", name="<img").click()
    expect(page.locator("h1")).to_have_text(name)
    dead = page.locator("section", has=page.get_by_role("heading", name="Dead letters"))
    expect(dead.locator("td.name")).to_contain_text(HOSTILE)
    expect(dead.locator("td.name .odd").first).to_have_text("U+202E")
    for summary in page.locator("summary").all():
        summary.click()
    expect(dead.locator("details .odd").nth(3)).to_be_visible()
    shown = page.evaluate("document.body.innerText")
    assert not set("\u202e\u2066\u200b\x07\x1b") & set(shown)
    assert page.locator("main img").count() == page.locator("main script").count() == 0
    dead.get_by_role("button", name="Remove all").click()
    expect(page.get_by_role("dialog")).to_contain_text(name)
    page.get_by_role("dialog").get_by_label("Type the name").fill(name)
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    expect(dead.locator("tbody")).to_have_text("nothing")
    assert page.title() == name
    page.goto(page.url.split("#")[0] + "#/q/" + "%E0%A4%A/m/" + "%3Cimg%20src%3Dx%3E")
    expect(page.locator("main")).to_contain_text("<img src=x>")
    assert not wide(page)


def test_a_lost_gateway_is_said_and_its_return_is_seen(page, tmp_path):
    url = f"sqlite:///{tmp_path}/q.db"
    with running(storage_for(url)) as served:
        port = served.gateway.port
        jobs(served, "a")
        go(page, served)
        expect(page.locator("#link")).to_have_text("live")
        expect(page.get_by_role("link", name="jobs")).to_be_visible()
    expect(page.locator("#link")).to_contain_text("connection lost")
    expect(page.get_by_role("link", name="jobs")).to_be_visible()
    with running(storage_for(url), port=port, admin_port=0) as served:
        served.storage.create("new-one")
        expect(page.locator("#link")).to_have_text("live")
        expect(page.get_by_role("link", name="new-one")).to_be_visible()
    page.goto("about:blank")


def test_pages_have_no_violation_light_or_dark_and_fit_a_phone(page, served):
    long = "name-" * 40
    served.storage.create(long)
    with served.storage.open(long) as queue:
        queue.send(long, key=long, headers={long: long})
    jobs(served, *("body " * 50 for _ in range(5)), dead=1, taken=1)

    def look(place):
        page.emulate_media(color_scheme="light")
        page.set_viewport_size(DESK)
        assert violations(page) == [], place
        page.emulate_media(color_scheme="dark")
        assert violations(page, "color-contrast") == [], place
        assert not wide(page), place
        page.set_viewport_size(PHONE)
        assert not wide(page), place

    for place, ready in (
        ("#/", "2 queues"),
        (f"#/q/{long}", "max_redeliveries"),
        (f"#/q/{long}/m/1", "waiting"),
        ("#/q/jobs", "rejected"),
        ("#/trouble", "dead letters"),
        ("#/keys", "Make a key"),
        ("#/q/jobs/m/2", "became a dead letter"),
    ):
        go(page, served, place)
        expect(page.locator("main")).to_contain_text(ready)
        look(place)
    go(page, served, "#/q/jobs")
    page.get_by_role("button", name="Send a message").click()
    look("dialog")


def test_the_keyboard_is_enough(page, served):
    jobs(served, "a", dead=1)
    go(page, served)
    expect(page.get_by_role("link", name="jobs")).to_be_visible()
    page.keyboard.press("Tab")  # from the content, which has the focus
    expect(page.get_by_label("Search by name")).to_be_focused()
    page.keyboard.type("job")
    page.get_by_role("button", name="Dead").press("Enter")
    expect(page.locator("th[aria-sort=descending]")).to_have_text("Dead")
    page.get_by_role("link", name="jobs").press("Enter")
    page.get_by_role("button", name="Redrive all").press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_role("button", name="Redrive all")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#said")).to_contain_text("1 redriven")
    assert counts(served) == (1, 0, 0)


def test_no_queue_and_a_thousand(page):
    with running(fresh_memory()) as served:
        go(page, served)
        expect(page.locator("main")).to_contain_text("No queues yet")
        assert violations(page) == []
        for i in range(1_000):
            served.storage.create(f"queue-{i:04}")
        expect(page.locator("main")).to_contain_text("1000 queues", timeout=30_000)
        page.get_by_label("Search by name").fill("queue-0999")
        expect(page.locator("tbody tr")).to_have_count(1)
        expect(page.locator("main")).to_contain_text("999 hidden by the search")
        page.goto("about:blank")


@pytest.mark.breadth
def test_a_queue_on_kafka(page, cluster, queue_name):
    root = f"/c{uuid.uuid4().hex[:8]}"
    url = f"kafka://{cluster.bootstrap}?zookeeper={cluster.zookeeper}&root={root}"
    with running(storage_for(url), roots={"": root}) as served:
        jobs(served, "a-body", "b-body", name=queue_name, partitions=1)
        go(page, served, f"#/q/{queue_name}")
        waiting = page.locator("section", has=page.get_by_role("heading", name="Waiting"))
        expect(waiting.locator("tbody tr")).to_have_count(2, timeout=60_000)
        expect(page.locator("dl.settings")).to_contain_text("partitions")
        page.get_by_role("button", name="Send a message").click()
        assert page.get_by_label("Priority").count() == 0, "Kafka has none"
        page.get_by_label("Body", exact=True).fill("c-body")
        page.get_by_role("dialog").get_by_role("button", name="Send").click()
        expect(waiting.locator("tbody tr")).to_have_count(3, timeout=60_000)
        waiting.locator("tbody a").first.click()
        expect(page.locator("ol.life")).to_contain_text("sent", timeout=60_000)
        go(page, served, "#/trouble")
        expect(page.locator("main")).to_contain_text("tracker", timeout=60_000)
        go(page, served, f"#/q/{queue_name}")
        row = page.locator("section", has=page.get_by_role("heading", name="Partitions")).locator("tbody tr")
        oldest = row.locator("time").first
        expect(row.locator("td.number")).to_have_text(["3", "0", "0"], timeout=60_000)
        assert oldest.get_attribute("datetime") == page.locator(".cards time").get_attribute("datetime")
        expect(row.locator("td").last).to_have_text("none")
        with TrackerProcess(url):
            expect(row.locator("td").last).not_to_have_text("none", timeout=60_000)
            tracker = served.storage.describe(queue_name).trackers[0]
            expect(row.locator("td").last).to_have_text(tracker)
            with served.storage.open(queue_name) as queue:
                (message,) = queue.receive(1, wait=30)
            told = by_url(served, "trace", message.receipt)
            assert ("in flight" in told, "taken" in told) == (True, True), told
            assert by_url(served, "trace", queue_name, message.id) == told
            by_url(served, "dead-letter", message.receipt, "--reason", "no such mailbox")
            assert wait_until(lambda: served.storage.describe(queue_name).dead == 1, 60)
            page.get_by_role("button", name="Look again").click()
            dead = page.locator("section", has=page.get_by_role("heading", name="Dead letters"))
            expect(dead).to_contain_text("no such mailbox", timeout=60_000)
            dead.get_by_role("button", name="Redrive all").click()
            page.get_by_role("dialog").get_by_role("button", name="Redrive").click()
            expect(dead.locator("tbody")).to_have_text("nothing", timeout=60_000)
            page.get_by_role("button", name="Purge…").click()
            page.get_by_label("Type the name").fill(queue_name)
            page.get_by_role("dialog").get_by_role("button", name="Remove").click()
            expect(waiting.locator("tbody")).to_have_text("nothing", timeout=60_000)
        page.goto("about:blank")


@pytest.mark.breadth
def test_pictures_for_people(browser, served, tmp_path):
    """Those of docs/, when KMQ_PICTURES names a folder; else that they can be made."""
    folder = Path(os.environ.get("KMQ_PICTURES", tmp_path))
    for name, count, dead in (
        ("mails", 240, 7),
        ("orders", 12, 0),
        ("thumbnails", 1_830, 31),
        ("webhooks", 0, 2),
    ):
        served.storage.create(name)
        with served.storage.open(name) as queue:
            queue.send_many([json.dumps({"to": f"user-{i}@example.org"}) for i in range(count + dead)])
            if dead:
                queue.dead_letter(queue.receive(dead), reason="HTTP 503 from upstream")
            if count:
                queue.receive(min(8, count // 2), lease=240)
        minute = SYSTEM_CLOCK.wall_ms() // 60_000
        depths = served.gateway._sampler._row(name).depths  # of an hour that nobody had to wait for
        depths.extend((minute - 59 + i, round(count * (1 + math.sin(i / 7 + count)) / 2)) for i in range(59))
    for file, view, scheme, place, ready in (
        ("console.png", {"width": 1000, "height": 420}, "light", "#/", "thumbnails"),
        ("console-queue.png", {"width": 1000, "height": 760}, "dark", "#/q/orders", "user-11"),
        ("console-phone.png", PHONE, "light", "#/q/mails", "user-7"),
    ):
        context = browser.new_context(viewport=view, color_scheme=scheme)
        page = context.new_page()
        go(page, served, place)
        expect(page.locator("main")).to_contain_text(ready)
        page.screenshot(path=folder / file)
        context.close()
        assert (folder / file).stat().st_size < 150_000
