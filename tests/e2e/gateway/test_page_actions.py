"""What a person does on the live page, checked in the queue itself."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from rollmesh.runtime.addresses import free_port

from ...kit.waiting import until
from .conftest import TOKEN, Scene, Window, expect

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

Open = Callable[..., Window]


@pytest.fixture(autouse=True)
def left_as_found(scene: Scene) -> Iterator[None]:
    """A test that fails halfway leaves no pause and no pin to the next one."""
    yield
    scene.in_store(lambda store: store.settings.set_user_paused(False))
    scene.in_store(lambda store: store.policies.pin(None))


def _with_token(page: "Page") -> None:
    page.fill("#token", TOKEN)
    page.press("#token", "Enter")
    page.locator("#action-result", has_text="Actions are open").wait_for()


def test_without_the_token_nothing_can_be_pressed_and_a_wrong_one_is_refused(window: Open) -> None:
    shown = window()
    shown.expect("401")  # the browser notes every refused request
    page = shown.open()
    page.locator("#version-table button.danger").first.wait_for()
    for button in ("#pause", "#resume", "#unpin", "#version-table button.danger", "#letter-table button.danger"):
        expect(page.locator(button).first).to_be_disabled()
    page.fill("#token", "not-the-token")
    page.press("#token", "Enter")
    page.locator("#action-error", has_text="the token is invalid").wait_for()
    expect(page.locator("#pause")).to_be_disabled()
    assert page.evaluate("[sessionStorage.length, localStorage.length]") == [0, 0]
    page.click("#settings summary")
    page.locator("#settings-text", has_text="The configuration needs the token").wait_for()
    _with_token(page)
    page.locator("#settings-text", has_text="recipe:countdown").wait_for()


def test_the_error_of_a_read_is_shown_until_the_read_succeeds(window: Open) -> None:
    shown = window()
    shown.expect("502")  # the browser notes every failed request
    page = shown.page
    for path in ("about", "config"):
        page.route(f"**/api/v1/{path}", lambda route: route.fulfill(status=502))
    shown.open()
    _with_token(page)
    page.click("#settings summary")
    banner = page.locator("#banner")
    expect(banner).to_contain_text("about: the gateway answered 502")
    expect(banner).to_contain_text("configuration: the gateway answered 502")
    page.unroute("**/api/v1/config")
    page.click("#settings summary")
    page.click("#settings summary")
    page.locator("#settings-text", has_text="recipe:countdown").wait_for()
    expect(banner).not_to_contain_text("configuration")
    page.unroute("**/api/v1/about")
    page.locator("#about", has_text="batches of").wait_for()
    expect(banner).to_be_hidden()


def test_the_token_stays_in_its_tab_and_can_be_forgotten(window: Open) -> None:
    shown = window()
    page = shown.open()
    _with_token(page)
    expect(page.locator("#token")).to_have_value("")
    assert page.evaluate("localStorage.length") == 0
    page.reload()
    page.locator("#action-result", has_text="Actions are open").wait_for()
    expect(page.locator("#pause")).to_be_enabled()
    page.click("#token-forget")
    expect(page.locator("#pause")).to_be_disabled()
    assert page.evaluate("sessionStorage.length") == 0


def test_a_link_brings_the_token_and_leaves_it_out_of_the_address(window: Open, scene: Scene) -> None:
    page = window(f"{scene.url}?token={TOKEN}").open()
    page.locator("#pause:not([disabled])").wait_for()
    page.wait_for_url(scene.url)


def test_a_run_that_hides_itself_is_shown_to_whoever_has_the_token(window: Open, scene: Scene) -> None:
    shown = window(scene.start_gateway("guarded", port=free_port(), token_for_reads="true"))
    shown.expect("401", "net::ERR_")  # refused first, and unanswered in the end
    page = shown.page
    page.goto(shown.url)
    page.locator("#connection", has_text="token required").wait_for()
    expect(page.locator("#banner")).to_contain_text("only to holders of its token")
    expect(page.locator("#facts > div")).to_have_count(0)
    page.fill("#token", TOKEN)
    page.press("#token", "Enter")
    shown.wait_for_looks(2)
    page.locator("#about", has_text="batches of").wait_for()
    expect(page.locator("#banner")).to_be_hidden()
    scene.stop("guarded")
    page.locator("#connection", has_text="disconnected").wait_for()


def test_a_version_is_pinned_and_unpinned(window: Open, scene: Scene) -> None:
    page = window().open()
    _with_token(page)
    [version] = _older(scene, 1)
    page.get_by_role("button", name=f"Pin v{version}", exact=True).click()
    page.locator("#facts", has_text=f"pinned at v{version}").wait_for()
    assert scene.in_store(lambda store: store.policies.pinned()) == version
    page.locator("#unpin:not([disabled])").click()
    page.locator("#action-result", has_text="Done").wait_for()
    until(lambda: scene.in_store(lambda store: store.policies.pinned()) is None, "the pin to be gone")


def _older(scene: Scene, count: int) -> list[int]:
    """Versions right below the newest one: the list on the page, of some hundreds, keeps them for the longest time."""
    until(lambda: scene.get("overview")["newest_version"] >= count, "older versions")
    return [one["policy_version"] for one in scene.get(f"policies?limit={count + 1}")["policies"][1:]]


def test_an_action_that_is_pressed_while_another_has_no_answer_follows_it(window: Open, scene: Scene) -> None:
    page = window().open()
    _with_token(page)
    later, earlier = _older(scene, 2)
    unanswered: list[Route] = []
    order: list[str] = []

    def note(event: str, url: str) -> None:
        if url.endswith("/pin"):
            order.append(f"{event} {url.split('/')[-2]}")

    page.on("request", lambda request: note("request", request.url))
    page.on("response", lambda response: note("response", response.url))
    page.route(f"**/policies/{earlier}/pin", lambda route: unanswered.append(route))
    page.get_by_role("button", name=f"Pin v{earlier}", exact=True).click()
    until(lambda: bool(page.title() and unanswered), "the request")  # a call of the page lets its events arrive
    page.get_by_role("button", name=f"Pin v{later}", exact=True).click()
    assert scene.in_store(lambda store: store.policies.pinned()) is None
    unanswered[0].continue_()
    page.locator("#facts", has_text=f"pinned at v{later}").wait_for()
    until(lambda: bool(page.title() and len(order) >= 4), "both answers")
    assert order == [f"request {earlier}", f"response {earlier}", f"request {later}", f"response {later}"]


def test_a_rollback_is_asked_for_only_after_a_yes(window: Open, scene: Scene) -> None:
    page = window().open()
    _with_token(page)
    [version] = _older(scene, 1)
    button = page.get_by_role("button", name=f"Roll back v{version}", exact=True)
    button.click()
    dialog = page.locator("#confirm")
    expect(dialog).to_contain_text("cannot be undone")
    expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
    assert scene.in_store(lambda store: store.rollbacks.pending()) is None
    button.click()
    dialog.get_by_role("button", name="Roll back").click()
    page.locator("#action-result", has_text="Done").wait_for()
    request = scene.in_store(lambda store: store.rollbacks.pending())
    assert request is not None and request.policy_version == version
    page.locator("#facts", has_text=f"rolling back to v{version}").wait_for()


def test_a_dead_letter_is_replayed_and_another_one_deleted(window: Open, scene: Scene) -> None:
    page = window().open()
    _with_token(page)
    letters = [letter.trajectory_id for letter in scene.in_store(lambda store: store.dead_letters.newest())]
    replayed, deleted = letters[0], letters[-1]
    page.get_by_role("button", name=f"Replay {replayed}", exact=True).click()
    page.locator("#letter-table tr", has_text="replayed as").wait_for()
    page.locator("#action-result", has_text="Done").wait_for()
    found = {letter.trajectory_id: letter for letter in scene.in_store(lambda store: store.dead_letters.newest())}
    expect(page.locator("#letter-table")).to_contain_text(f"replayed as {found[replayed].replayed_as}")
    page.get_by_role("button", name=f"Delete {deleted}", exact=True).click()
    page.locator("#confirm").get_by_role("button", name="Cancel").click()
    assert deleted in {letter.trajectory_id for letter in scene.in_store(lambda store: store.dead_letters.newest())}
    page.get_by_role("button", name=f"Delete {deleted}", exact=True).click()
    page.locator("#confirm").get_by_role("button", name="Delete").click()
    page.wait_for_function("id => !document.getElementById('letter-table').textContent.includes(id)", arg=deleted)
    assert deleted not in {letter.trajectory_id for letter in scene.in_store(lambda store: store.dead_letters.newest())}


def test_more_processes_than_the_machine_can_serve_are_started_only_after_a_yes(window: Open, scene: Scene) -> None:
    scene.in_store(lambda store: store.scaling.request("reward", 1))  # no launcher has a process to show
    shown = window()
    shown.expect("409")  # the browser notes every refused request
    page = shown.open()
    _with_token(page)
    page.fill("#scale-reward", "250")
    button = page.get_by_role("button", name="Scale reward", exact=True)
    dialog = page.locator("#confirm")
    button.click()
    page.locator("#confirm", has_text="reward=250").wait_for()
    dialog.get_by_role("button", name="Cancel").click()
    page.locator("#action-error", has_text="reward=250").wait_for()
    assert scene.in_store(lambda store: store.scaling.requests())["reward"] == 1
    button.click()
    dialog.get_by_role("button", name="Start them").click()
    page.locator("#action-result", has_text="reward replicas: 250").wait_for()
    assert scene.in_store(lambda store: store.scaling.requests())["reward"] == 250
    scene.in_store(lambda store: store.scaling.request("reward", None))
