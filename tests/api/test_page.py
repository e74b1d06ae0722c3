"""The chat page in a real browser: streams, folds thoughts away, shows calls, pictures, counts."""

import shutil

import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")
playwright = pytest.importorskip("playwright.sync_api", reason="the dev extra is not installed")

from openai_server import serving  # noqa: E402
from openk3.text.image import ImageProcessor  # noqa: E402
from scripted_engine import ids_of, tokenizer  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
END = "⟨C⟩message⟨S⟩⟨E⟩"
ARGUMENT = '⟨O⟩argument key="city" type="string"⟨S⟩Paris⟨C⟩argument⟨S⟩'
CALL = f'⟨O⟩call tool="weather" index="1"⟨S⟩{ARGUMENT}⟨C⟩call⟨S⟩'
EVIL = "<img src=x onerror=\"document.title='forged'\">"
SCRIPT = (
    f"a plan⟨C⟩think⟨S⟩⟨O⟩response⟨S⟩It is {EVIL}⟨C⟩response⟨S⟩⟨O⟩tools⟨S⟩{CALL}⟨C⟩tools⟨S⟩{END}"
)
KEY = "sk-page"


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as started:
        new = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield new
        new.close()


def test_a_conversation_in_the_page(browser, tmp_path):
    Image = pytest.importorskip("PIL.Image", reason="the vision extra is not installed")
    picture = tmp_path / "red.png"
    Image.new("RGB", (16, 16), "red").save(picture)
    processor = ImageProcessor(patch_size=4)
    with serving(ids_of(SCRIPT), keys=[KEY], processor=processor) as server:
        page = browser.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(server.url)
        page.get_by_text("Enter the API key").wait_for()
        page.fill("#key", KEY)
        page.press("#key", "Tab")
        page.get_by_text("tiny-k3").wait_for()

        page.fill("#text", "What is the weather?")
        page.press("#text", "Enter")
        page.get_by_text("prompt tokens cached").wait_for()
        answer = page.locator("article.assistant")
        assert answer.locator("> .text").inner_text() == f"It is {EVIL}"
        assert page.title() == "OpenK3"
        thought = answer.locator("details")
        assert thought.get_attribute("open") is None
        assert not thought.locator(".text").is_visible()
        thought.locator("summary").click()
        assert thought.locator(".text").inner_text() == "a plan"
        assert answer.locator("pre.call").inner_text() == 'weather({"city": "Paris"})'
        note = answer.locator("small").inner_text()
        assert "tokens/s" in note
        assert "0 of" in note

        with page.expect_file_chooser() as chooser:
            page.click("#attach")
        chooser.value.set_files(picture)
        page.locator("#pictures img").wait_for()
        page.select_option("#effort", "none")
        page.fill("#text", "And here?")
        page.click("#send")
        page.locator("article.assistant small").nth(1).filter(has_text="cached").wait_for()
        assert page.locator("article.user img").count() == 1
        *_, request = server.engine.seen.values()
        assert request.media.grid_thws.tolist() == [[1, 4, 4]]
        page.click("#new")
        assert page.locator("article").count() == 0
        assert problems == []
        page.close()


def test_stop_ends_the_work_and_errors_are_shown(browser):
    long = ids_of("hm⟨C⟩think⟨S⟩⟨O⟩response⟨S⟩" + "x" * 5000)
    with serving(long, step_s=0.02, max_queued=1) as server:
        page = browser.new_page()
        page.goto(server.url)
        page.fill("#text", "hi")
        page.press("#text", "Enter")
        page.locator("article.assistant > .text").filter(has_text="xx").wait_for()
        other = browser.new_page()
        other.goto(server.url)
        other.fill("#text", "hi")
        other.press("#text", "Enter")
        other.locator(".error").filter(has_text="wait already").wait_for()
        page.get_by_role("button", name="Stop").click()
        page.locator("article.assistant small").filter(has_text="stopped").wait_for()
        assert server.engine.told.wait(30)
        page.close()
        other.close()


def test_what_was_not_answered_can_be_sent_again(browser):
    """An error is seen, the message is back in the box, and the next answer is as if it had not
    been; also when the server was gone, or the answer broke off in the middle."""
    answers = ids_of("fine⟨C⟩think⟨S⟩⟨O⟩response⟨S⟩It is fine.⟨C⟩response⟨S⟩" + END)
    with serving(answers, max_context=600) as server:
        page = browser.new_page(viewport={"width": 340, "height": 420})
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(server.url)
        page.fill("#text", "x " * 2000)
        page.press("#text", "Enter")
        error = page.locator(".error")
        error.filter(has_text="the context holds 600").wait_for()
        assert in_view(error, page)
        assert page.input_value("#text") == ("x " * 2000).strip()
        page.fill("#text", "hi")
        page.press("#text", "Enter")
        note = page.locator("article.assistant small").filter(has_text="cached")
        note.wait_for()
        assert in_view(note, page)
        assert page.input_value("#text") == ""
        *_, request = server.engine.seen.values()
        assert "x x x" not in tokenizer().decode(request.prompt_ids)
        assert page.evaluate("document.documentElement.scrollWidth") == 340

        for route, said in (
            (lambda route: route.abort(), "does not answer"),
            (lambda route: route.fulfill(status=502, body="<html>"), "The server answers 502"),
            (lambda route: route.fulfill(status=200, body=CUT), "broke off"),
        ):
            page.route("**/chat/completions", route)
            page.fill("#text", "again")
            page.press("#text", "Enter")
            page.locator(".error").filter(has_text=said).wait_for()
            assert page.input_value("#text") == "again"
            page.unroute("**/chat/completions")
        page.press("#text", "Enter")
        page.locator("article.assistant small").filter(has_text="cached").nth(1).wait_for()
        *_, request = server.engine.seen.values()
        assert tokenizer().decode(request.prompt_ids).count("again") == 1
        assert problems == []
        page.close()


CUT = 'data: {"choices": [{"index": 0, "delta": {"content": "It"}, "finish_reason": null}]}\n\n'


def in_view(element, page) -> bool:
    box, frame = element.last.bounding_box(), page.locator("#talk").bounding_box()
    return frame["y"] <= box["y"] and box["y"] + box["height"] <= frame["y"] + frame["height"] + 1


def test_a_new_chat_forgets_the_answer_that_still_ran(browser):
    long = ids_of("hm⟨C⟩think⟨S⟩⟨O⟩response⟨S⟩" + "x" * 5000)
    with serving(long, step_s=0.01) as server:
        page = browser.new_page()
        page.goto(server.url)
        page.fill("#text", "old")
        page.press("#text", "Enter")
        page.locator("article.assistant > .text").filter(has_text="xx").wait_for()
        page.click("#new")
        page.fill("#text", "new")
        page.press("#text", "Enter")
        page.locator("article.assistant > .text").filter(has_text="xx").wait_for()
        assert page.get_by_role("button", name="Stop").count() == 1
        assert page.locator("article").count() == 2
        *_, request = server.engine.seen.values()
        prompt = tokenizer().decode(request.prompt_ids)
        assert prompt.count("role=") == 3  # effort, the user, and the answer that is asked for
        page.close()


def test_a_model_that_cannot_chat_says_so(browser):
    from openk3.text.train_tokenizer import train

    with serving() as server:
        words = ["the weather is fine " * 20]
        server.state.tokenizer = train(words, 300, special_tokens=["[BOS]", "[EOS]"])
        page = browser.new_page()
        page.goto(server.url)
        page.get_by_placeholder("it cannot chat").wait_for()
        page.fill("#text", "hi")
        page.press("#text", "Enter")
        assert page.locator("article").count() == 0
        page.close()


def test_the_page_loads_nothing_from_elsewhere():
    with serving() as server:
        answer = server.client.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "http://" not in answer.text
    assert "https://" not in answer.text
    assert "innerHTML" not in answer.text
