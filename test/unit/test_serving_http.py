"""When a stream's headers are sent: late enough to carry the right status, and no later."""

import asyncio
import json

from fastapi.responses import PlainTextResponse, StreamingResponse

from sglang_lazy.serving.streams import REQUEST_SENT, fail_before_stream

ERROR = 'data: {"error": {"message": "the reason", "code": 413}}\n\n'


def streamed(*steps):
    """A response with the events `steps`; a future is awaited, and None marks when the request is sent to the
    scheduler."""

    async def events():
        for step in steps:
            if step is None:
                REQUEST_SENT.get().set_result(None)
            elif isinstance(step, str):
                yield step
            else:
                await step

    return StreamingResponse(events())


async def rest_of(response):
    return [event async for event in response.body_iterator]


def test_headers_do_not_wait_for_the_first_event():
    async def ask():
        token = asyncio.get_running_loop().create_future()
        response = await asyncio.wait_for(fail_before_stream(streamed(None, token, "a", "b")), timeout=60)
        assert not token.done()
        token.set_result(None)
        return response.status_code, await rest_of(response)

    assert asyncio.run(ask()) == (200, ["a", "b"])


def test_an_error_before_dispatch_sets_the_status():
    response = asyncio.run(fail_before_stream(streamed(ERROR, "never read")))
    assert response.status_code == 413
    assert json.loads(response.body)["error"]["message"] == "the reason"


def test_an_error_after_dispatch_is_an_event():
    async def ask():
        later = asyncio.get_running_loop().create_future()
        response = await fail_before_stream(streamed(None, later, ERROR))
        later.set_result(None)
        return response.status_code, await rest_of(response)

    assert asyncio.run(ask()) == (200, [ERROR])


def test_without_a_dispatch_the_first_event_decides():
    async def ask():
        response = await fail_before_stream(streamed("a", ERROR))
        return response.status_code, await rest_of(response)

    assert asyncio.run(ask()) == (200, ["a", ERROR])


def test_a_client_that_disconnects():
    assert asyncio.run(fail_before_stream(streamed())).status_code == 499


CREATED = 'event: response.created\ndata: {"type": "response.created"}\n\n'


def refused(error, *later):
    """The response to a stream whose first event carries no output, and whose request is then refused with `error`."""

    async def events():
        yield CREATED
        REQUEST_SENT.get().set_result(error)
        for event in later:
            yield event

    async def ask():
        response = await fail_before_stream(StreamingResponse(events()), refuse=PlainTextResponse)
        return response.body if not isinstance(response, StreamingResponse) else await rest_of(response)

    return asyncio.run(asyncio.wait_for(ask(), timeout=60))


def test_an_opening_event_is_held_until_dispatch():
    assert refused(ValueError("too long"), "failed") == b"too long"
    assert refused(ValueError("too long")) == b"too long"
    assert refused(None, "a", "b") == [CREATED, "a", "b"]


def test_the_event_of_a_refused_request_is_awaited():
    async def events():
        REQUEST_SENT.get().set_result(ValueError("the reason"))
        await asyncio.sleep(0.01)
        yield ERROR

    response = asyncio.run(fail_before_stream(StreamingResponse(events())))
    assert response.status_code == 413


def test_streams_without_a_dispatch_are_passed_on():
    async def ask():
        response = await fail_before_stream(streamed("a", "b"), refuse=PlainTextResponse)
        return await rest_of(response)

    assert asyncio.run(ask()) == ["a", "b"]
