"""Guards: what is a usable user turn (contract 8; faults of the harness contract's section 5, by number)."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traitbasis.chat import Turn, read_messages
from traitbasis.errors import RequestError
from traitbasis.guards import GUARDS, Conversation, Guard, choose_guards, failed_guard, named_stop_tokens
from traitbasis.metrics.identifiers import flat_text, unknown_identifiers
from traitbasis.pairs import known_traits, load_pairs

BY_NAME = {guard.name: guard for guard in GUARDS}
INSTRUCTION = """You are a user talking to an agent of a shop.

Instruction: You are Mei Kovacs, user id mei_kovacs_8020, zip code 28236. Your desk lamp from order #W100 is too bright
and you want to exchange it for a less bright one, paid with the card ending in 4471. Your router is an AX3000.

Rules:
- Just write a single line at a time, the way a shopper types.
- Never tell everything at once; what the present step asks for is enough.
- When your goal is reached, send '###STOP###' as a message of its own. Send ###TRANSFER### when you are handed over,
  and ###OUT-OF-SCOPE### when the instruction does not say what to do.
"""
TOKENS = named_stop_tokens(INSTRUCTION)
HELLO = ("agent", "Hi! How can I help you today?")
ASKED = ("customer", "My desk lamp is too bright, can I exchange it?")


def talk(*lines: tuple[Any, str], system: str = INSTRUCTION, tokens: tuple[str, ...] = TOKENS) -> Conversation:
    return Conversation(tuple(Turn(speaker, text) for speaker, text in (("system", system), *lines)), tokens)


FIRST = talk(HELLO)
LATER = talk(HELLO, ASKED, ("agent", "Done. The exchange is on its way. Is there anything else?"))


def rejects(name: str, text: str, conversation: Conversation = LATER) -> bool:
    return failed_guard(text, [BY_NAME[name]], conversation) is not None


# --- text alone -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["", " ", "\n\t ", "\u200b", "\ufeff \u00ad", "\u2028\x00\x1b", "\u3164", "\u2800 \u2800", "\u0301", "\ufe0f"],
)
def test_what_nobody_would_see_is_empty(text: str) -> None:
    """Faults 6, 8 and 10: never an empty completion."""
    assert rejects("empty", text) and not BY_NAME["empty"].sendable


@pytest.mark.parametrize("text", ["a", "?", "...", "👍", "e\u0301", "\u2800x", "한글", "なし", "  ok\n"])
def test_what_can_be_seen_is_not_empty(text: str) -> None:
    assert not rejects("empty", text)


@pytest.mark.parametrize(
    "text",
    [
        "<think>The user wants a refund.</think>",  # fault 9: thinking alone
        "<think>hm",
        "hm</think>Where is it?",
        "<THINKING>",
        "</thinking> yes",
        "think> I should say yes",  # fault 16: half a tag
        "◁think▷ so",
        "<reasoning>short</reasoning> Yes.",
    ],
)
def test_thoughts_are_not_for_the_agent(text: str) -> None:
    assert rejects("thought", text) and not BY_NAME["thought"].sendable


@pytest.mark.parametrize(
    "text",
    [
        "Okay, the user wants me to ask for a refund. I should be impatient.",  # fault 13
        "Okay, so the user is asking for the order number.",
        "Hmm, let's see. The customer wants an exchange.",
        "The user asked for a refund, so I will ask for it.",
        "Alright, I need to respond as a frustrated customer.",
        "We need to produce one line as the user.",
        "As the customer, I should give the order number now.",
        "So the agent is asking for the zip code. I will give it.",
        "Let me think about how to reply. Yes.",
        "Thought: the agent wants my name.\nIt's Mei.",
        "**Thinking:** maybe",
        "Inner monologue: I am angry.\nRefund me.",
    ],
)
def test_a_model_does_not_talk_to_itself_about_its_part(text: str) -> None:
    """Prose can be a customer's after all: it is avoided, and sent when nothing better comes."""
    assert rejects("reasoning", text) and BY_NAME["reasoning"].sendable
    assert all(not rejects(guard.name, text) for guard in GUARDS if not guard.sendable)


@pytest.mark.parametrize(
    "text",
    [
        "Okay, so the customer has to pay for shipping?",
        "We need to reply as soon as possible.",
        "I need to respond with a decision by Friday.",
        "So the customer is always right?",
        "The user wants to reset her password, can you do that?",
        "The customer says the parcel never came.",
        "So the agent wants me to call back?",
        "As the customer, I should be able to cancel.",
        "As the customer I must say I'm disappointed.",
        "I have to act like an adult here.",
        "Let me draft a letter to my lawyer.",
        "Let me think about what to do.",
        "I must respond as the customer service rep told me.",
        "I think it was Monday.",
        "Okay, the user manual says to hold the button.",
        "Okay, the agent yesterday told me something else.",
        "Let me think... it was March, I believe.",
        "I need to reply to your email, where is it?",
        "I should answer the survey as well?",
        "On second thought, I'd like the refund.",
        "So, the customer service number is busy all day.",
        "No thoughts, just cancel it.",
        "The user name is mei.",
        "I don't follow your reasoning: why is there a fee?",
    ],
)
def test_a_customer_may_think_aloud(text: str) -> None:
    assert not rejects("thought", text) and not rejects("reasoning", text)


@pytest.mark.parametrize(
    "text",
    [
        "Yes.<|im_end|>",
        "<|eot_id|>",
        "<｜User｜> hello",
        "[INST] hello [/INST]",
        "<<SYS>> you are",
        "Sure</s>",
        "<s>Sure",
        "<bos>Hi",
        "<start_of_turn>user",
        '<tool_call>{"name": "x"}</tool_call>',
        "<function=toggle_data>{}</function>",
        "[TOOL_CALLS] x",
        "Yes.im_end",
        "caf\ufffd",
        "▁Hello▁there",
        "[/SYS] hello",
        "[PAD][PAD]",
    ],
)
def test_a_templates_debris_is_rejected(text: str) -> None:
    assert rejects("special_token", text) and not BY_NAME["special_token"].sendable


@pytest.mark.parametrize(
    "text",
    [
        "System: You are a customer of a shop.",
        "Yes.\nassistant\nSure, it is done.",
        "My lamp is broken.\n\nAgent: I'm sorry to hear that.\n\nUser: Thanks.",
        "Customer: Refund me now.",
        "User: #W100\nAgent: Thank you.",
        "assistant: I want a refund.",
        "User: I want a refund.",
        "I want a refund.\nAgent: Sure!",
        "**Customer:** I want a refund.",
        "Human: hello",
        "Customer Service: Hello",
        "user\nI want a refund",
        "User Response: hi",
    ],
)
def test_a_turn_is_no_transcript(text: str) -> None:
    """What speaks for others too is avoided, and sent when nothing better comes: it may be a list of details."""
    assert rejects("transcript", text) and BY_NAME["transcript"].sendable
    assert all(not rejects(guard.name, text) for guard in GUARDS if not guard.sendable)


@pytest.mark.parametrize(
    "text",
    [
        "My details:\nUser: mia_li_3668",
        "User: mia_li_3668\nOrder: #W100",
        "Customer: Mia Li, order #W100",
        "System: Windows 11\nRouter: AX3000",
        "The screen says [SYS] error",
        "Agent: Sarah, badge 12.\nDate: May 3",
        "Customer: Mia Li\nAgent: Sarah",
        "I saved the chat. It says:\nAgent: I will refund it.",
        "I wore a [mask].\nuser: mia",
        "I am the user of this account: it is in my name.",
        "My user id: mei_kovacs_8020",
        "Username: mei",
        "The price is < 20 dollars, or is it > 20?",
        "Is the support agent: a robot?",
        "I pressed [1] and then [2].",
        "I love it <3",
        "Model: AX3000",
        "The assistant I spoke to said no",
        "a | b | c",
        "agents: all of them told me so",
    ],
)
def test_ordinary_text_holds_no_special_tokens(text: str) -> None:
    assert not rejects("special_token", text) and not rejects("transcript", text)


def test_a_thought_is_welcome_where_the_instruction_asks_for_it() -> None:
    """Fault 17: tau-bench's react users must write a thought and ``User Response:``, and the harness cuts it."""
    react = talk(HELLO, ASKED, HELLO, system="First a 'Thought:', then 'User Response:'. At the end '###STOP###'.")
    assert failed_guard("Thought:\nThey greet me.\n\nUser Response:\nMy lamp is too bright.", GUARDS, react) is None
    assert failed_guard("Thought:\nAll done.\n\nUser Response:\n###STOP###", GUARDS, react) is None
    for reply, name in [
        ("Thought:\nThey greet me.", "reasoning"),
        ("Thought:\nhm\n\nUser Response:\n", "empty"),
        ("Thought:\nhm\n\nUser Response:\nThanks! ###STOP###", "stop_token"),
        ("Thought:\nhm\n\nUser Response:\nHow may I assist you?", "role_flip"),
    ]:
        failed = failed_guard(reply, GUARDS, react)
        assert failed is not None and failed.name == name


# --- stop tokens ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "tokens"),
    [
        (INSTRUCTION, ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")),
        (
            "Send ###STOP### when done, or ###UNSATISFIED### in anger. Only then ###STOP###.",
            "###STOP### ###UNSATISFIED###",
        ),
        ("'##END##', then \"<<DONE>>\", `[[BYE]]` or $$QUIT_NOW$$.", "##END## <<DONE>> [[BYE]] $$QUIT_NOW$$"),
        ("", ()),
        ("### Rules\n## STOP ##\n### RULES ###\n####", ()),
        ("#STOP# [STOP] <STOP> **STOP** ###STOP## ###stop### #1 ##2##", ()),
    ],
)
def test_the_instruction_names_the_stop_tokens(system: str, tokens: str | tuple[str, ...]) -> None:
    assert named_stop_tokens(system) == tuple(tokens.split() if isinstance(tokens, str) else tokens)


TAU_BENCH = """You are a user interacting with an agent.
Rules:
- Just generate one line at a time to simulate the user's message.
- If the instruction goal is satisified, generate '###STOP###' as a standalone message without anything else to end."""


@pytest.mark.parametrize(
    ("system", "tokens"),
    [
        (TAU_BENCH, "###STOP###"),
        (
            "- If the task goal is satisfied, generate the '###STOP###' token to end the conversation.\n"
            "- If you are transferred to another agent, generate the '###TRANSFER###' token.\n"
            "- If the scenario lacks information, generate the '###OUT-OF-SCOPE###' token.",
            "###STOP### ###TRANSFER### ###OUT-OF-SCOPE###",
        ),
        (TAU_BENCH + "\n- If your feelings are ignored, generate '###UNSATISFIED###'.", "###STOP### ###UNSATISFIED###"),
        ("You are Bo, who wants a refund. When you have it, reply with <END> and nothing else.", "<END>"),
        ("Play a caller.\n- Be brief.\n- Once your problem is solved, output exactly:\n[DONE]", "[DONE]"),
        ("Finish the conversation with ***DONE***. Do not say ***DONE*** before the agent agreed.", "***DONE***"),
        ("Speak as a guest. To hang up, you say `__DONE__`, or send [GIVE_UP].", "__DONE__"),
        ("You want a table. End your last message with ##Exit##.", "##Exit##"),
        ("Leave when you like: type '[FAREWELL]' to end the chat.", "[FAREWELL]"),
        ("Your name is [NAME]. Say [NAME] and send <ORDER_ID> when asked. **Done** is a brand.", ""),
        ("Never output <END> or any other tag. Write plain text.", ""),
        ("Write your answer as <DONE>yes</DONE>.", ""),
        ("The log reads [DONE] at the end of each job; __END__ closes a Perl file.", ""),
        ("Send the photos. See [END] of the manual, and [DONE](http://x.example).", ""),
        ("Reply with [YES] or [NO]. Say <END_DATE> and [START] aloud.", ""),
    ],
)
def test_other_marks_are_stop_tokens_where_the_instruction_says_to_send_them(system: str, tokens: str) -> None:
    assert named_stop_tokens(system) == tuple(tokens.split())


@pytest.mark.parametrize("token", ["<END>", "[DONE]", "***DONE***", "__DONE__", "##Exit##", "bye"])
def test_a_told_token_is_a_token_like_others(token: str) -> None:
    told = talk(HELLO, ASKED, HELLO, tokens=(token,))
    assert failed_guard(token, GUARDS, told) is None
    assert rejects("stop_token", f"Thanks. {token}", told)
    assert rejects("stop_early", token, talk(HELLO, ASKED, ("agent", "Shall I cancel it?"), tokens=(token,)))
    assert BY_NAME["stop_token"].last_resort is not None
    assert BY_NAME["stop_token"].last_resort(f"Thanks. {token}", told) == "Thanks."


def test_a_word_as_a_token_is_a_word_of_its_own() -> None:
    own = talk(HELLO, ASKED, HELLO, tokens=("bye", "all done"))
    assert BY_NAME["stop_token"].last_resort is not None
    cut = BY_NAME["stop_token"].last_resort
    for text in ["Goodbyes are hard", "byes", "We are all donenow", "bye_1"]:
        assert not rejects("stop_token", text, own) and cut(text, own) == text
    for text, left in [("Goodbyes, bye for now", "Goodbyes, for now"), ("Is it all done?", "Is it ?")]:
        assert rejects("stop_token", text, own) and cut(text, own) == left


@pytest.mark.parametrize("token", [*TOKENS, " ###STOP###\n"])
def test_a_named_token_stands_alone_and_not_on_the_first_turn(token: str) -> None:
    assert failed_guard(token, GUARDS, LATER) is None
    assert rejects("stop_token", token, FIRST)
    assert BY_NAME["stop_token"].last_resort is not None
    assert BY_NAME["stop_token"].last_resort(token, FIRST) == ""


@pytest.mark.parametrize(
    ("text", "without"),
    [
        ("Thanks!###STOP###", "Thanks!"),  # fault 4
        ("Yes, I confirm. ###STOP###", "Yes, I confirm."),  # fault 2
        ("###STOP### Bye.", "Bye."),
        ("Thanks ###STOP### and bye", "Thanks and bye"),
        ("###STOP######STOP###", ""),
        ("###STOP###.", None),
        ("'###STOP###'", None),
        ("###ST###STOP###OP###", ""),
        ("####STOP####", ""),
        ("###STOPP###", ""),
        ("### STOP ###", ""),
        ("STOP###", ""),
        ("###STOP", ""),
        ("##STOP##", ""),
        ("#STOP#", ""),
        ("Thanks. ###STOP", "Thanks."),
        ("STOP", None),
        ("**STOP**", None),
        ("###stop###", None),
        ("###UNSATISFIED###", ""),  # not named here
        ("<<STOP>>", ""),
    ],
)
def test_anything_but_a_named_token_alone_is_rejected(text: str, without: str | None) -> None:
    """Faults 2 and 4. When tries ran out, the text goes out without the token: the one place where text is cut."""
    assert rejects("stop_token", text)
    cut = BY_NAME["stop_token"].last_resort
    assert cut is not None
    left = cut(text, LATER)
    assert left == without or without is None
    assert not any(token in left for token in TOKENS) and "##" not in left


@pytest.mark.parametrize(
    "text",
    [
        "Order #W100, please.",
        "You're my #1 shop.",
        "Stop sending me emails.",
        "I want to STOP the subscription.",
        "Dial ##002# to switch it off, they said.",
        "Please transfer me.",
        "C# and F# are languages",
        "I'd give it 100% :) $$",
        "a << b",
    ],
)
def test_ordinary_text_is_no_stop_token(text: str) -> None:
    assert not rejects("stop_token", text) and not rejects("stop_token", text, FIRST)


def test_without_named_tokens_none_is_legal() -> None:
    bare = talk(HELLO, ASKED, HELLO, system="You want a refund.", tokens=())
    assert rejects("stop_token", "###STOP###", bare) and not rejects("stop_token", "STOP", bare)


@pytest.mark.parametrize("tokens", [("",), (" ", "\n"), ("#",), ("X",), ("TERMINATE", "[END]", "")])
def test_a_served_users_own_tokens_may_have_any_shape(tokens: tuple[str, ...]) -> None:
    """They come from a file. Blank ones are none; cutting the others out ends."""
    own = talk(HELLO, ASKED, HELLO, tokens=tokens)
    text = "\n # X Thanks. TERMINATE [END]"
    assert rejects("stop_token", text, own) == any(token.strip() for token in tokens)
    assert BY_NAME["stop_token"].last_resort is not None
    cut = BY_NAME["stop_token"].last_resort(text, own)
    assert "Thanks." in cut and not any(token in cut for token in tokens if token.strip())
    assert failed_guard("I'd like it less bright.", GUARDS, own) is None
    for token in filter(str.strip, tokens):
        assert not rejects("stop_token", token, own)


def test_a_first_turn_is_one_before_which_the_customer_said_nothing() -> None:
    called = Conversation((Turn("system", INSTRUCTION), Turn("agent", "Hi"), Turn("customer", "")), TOKENS)
    assert rejects("stop_token", "###STOP###", called)


# What an agent says last, and whether ending the conversation on it is premature. Our own writing.
WAITING = [
    "I will cancel #W1. Do you confirm (yes/no)?",  # fault 1
    "I can exchange the lamp for the dimmer one at no cost. Shall I go ahead?",
    "The fee is $25. Would you like me to proceed?",
    "You will be moved to flight HA 12 on May 3. Please confirm.",
    "To continue, please reply “yes”.",
    "I'll refund $48.20 to the card ending in 4471. Is that correct?",
    "Two bags will be added for $70. Do you want me to book them?",
    "The appointment would be on Friday at 10. Does that work for you?",
    "Here is the new total: $91. May I place the order?",
    "Before I change the address: do you agree to the new delivery date, yes or no?",
    "Once you confirm these details, I will submit the claim.",
    "Should I process the return with a printed label?",
    "Are you okay to proceed?",
    "I have one at 2:30 pm. Would that work?",
    "The generic one is $8. Would you like that instead?",
    "Your plan will change on June 1. Say yes to go on.",
    "I would cancel the order and refund the gift card. Do you want to go ahead with that?",
]
FINISHED = [
    "Done. Your order is cancelled. Please confirm you received the email.",
    "Your refund is done. Is that okay?",
    "Transferred. Shall I close this chat?",
    "I've cancelled it and refunded the card. Does that work for you?",
    "All done. Could you please confirm receipt of the email?",
    "Done, #W1 is cancelled. Is there anything else I can help you with?",
    "Your exchange is set up. You will get an email with the label. Have a nice day!",
    "The refund was issued this morning.",
    "I have moved you to HA 12. Would you like help with anything else?",
    "You are being transferred to a human agent. Please hold on.",
    "I'm sorry, I cannot change that order.",
    "All done! Shall I help you with something else?",
    "You're welcome! Please confirm if there is anything else.",
    "Thank you for confirming. The order is placed.",
    "Do you have any other questions?",
    "Great, your address is updated.",
    "As you confirmed, both bags were added. Goodbye!",
    "The claim is filed. What was the weather like?",
    "Your booking is complete. Do you need any further help?",
    "",
]


@pytest.mark.parametrize("last", WAITING)
def test_a_customer_does_not_leave_while_a_yes_is_awaited(last: str) -> None:
    """Fault 1: the action would never be executed. Fault 2: a plain yes is fine."""
    waiting = talk(HELLO, ASKED, ("agent", last))
    assert rejects("stop_early", "###STOP###", waiting)
    assert failed_guard("Yes, please.", GUARDS, waiting) is None and failed_guard("No.", GUARDS, waiting) is None
    assert BY_NAME["stop_early"].last_resort is not None
    assert BY_NAME["stop_early"].last_resort("###STOP###", waiting) == ""
    assert not rejects("stop_early", "###OUT-OF-SCOPE###", waiting)


@pytest.mark.parametrize("last", FINISHED)
def test_a_customer_may_leave_when_nothing_is_asked(last: str) -> None:
    assert not rejects("stop_early", "###STOP###", talk(HELLO, ASKED, ("agent", last)))


def test_a_customer_who_insists_may_leave_unless_the_agent_does_wait() -> None:
    leave = BY_NAME["stop_early"].last_resort
    assert leave is not None
    for last in ["Do you want to go ahead? Is there anything else?", "Shall I book it? Tell me. I am here. Bye. Bye."]:
        unsure = talk(HELLO, ASKED, ("agent", last))
        assert rejects("stop_early", "###STOP###", unsure) and leave("###STOP###", unsure) == "###STOP###"
    for last in ["I have cancelled the hotel. Shall I cancel the flight too?", "Once it is refunded, is that okay?"]:
        waiting = talk(HELLO, ASKED, ("agent", last))
        assert rejects("stop_early", "###STOP###", waiting) and leave("###STOP###", waiting) == ""


# --- repeats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        ASKED[1],
        "my desk lamp is too bright -- can i exchange it",
        "  My desk lamp\nis too bright, can I exchange it?!",
        "Done. The exchange is on its way. Is there anything else?",
    ],
)
def test_a_turn_said_before_word_for_word_is_a_repeat(text: str) -> None:
    assert rejects("repeat", text)


@pytest.mark.parametrize("text", ["Yes.", "Yes, please.", "Yes, please go ahead.", "#W100", "No, that is all, thanks."])
def test_short_answers_may_repeat(text: str) -> None:
    assert not rejects("repeat", text, talk(HELLO, ("customer", text), HELLO))


@pytest.mark.parametrize("text", ["My lamp is too bright, can I exchange it?", "!?", "My desk lamp is too bright."])
def test_other_words_are_no_repeat(text: str) -> None:
    assert not rejects("repeat", text)


def test_only_the_agents_last_message_counts_as_an_echo() -> None:
    assert rejects("repeat", HELLO[1], FIRST) and not rejects("repeat", HELLO[1])


# --- identifiers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "My booking reference is BKN123456.",  # fault 20
        "It's order #W101.",
        "It's W2378156, I think.",
        "sure, qx7rtm1: w2378156",
        "KQ7TRM",
        "Claim RT-31905, please.",
        "My email is mei.kovacs@mail.example.",
        "User sara_doe_496.",
        "Call me at (555) 010-2345.",
        "call +44 20 7946 0018",
        "The card ends in 5082.",
        "My zip is 90210.",
        "4111 1111 1111 1111",
        "member number 77-1940",
        "It is 8JW2PL.",
        "gift_card_8020792",
        "The account is 41907726",
        "LB 60931",
        "#123",
    ],
)
def test_an_invented_identifier_is_rejected(text: str) -> None:
    """Fault 20: it occurs nowhere in the conversation."""
    assert rejects("unknown_identifier", text)


@pytest.mark.parametrize(
    "text",
    [
        "Order W100.",
        "order # w-100!",
        "I'm mei_kovacs_8020, zip 28236.",
        "MEI_KOVACS_8020",
        "card ending 4471",
        "My router model is an AX3000, and the model prompt ai benchmark words survive.",  # fault 21
        "ax-3000",
        "It happened in 2019, on 2024-05-03 or 03/05/2024, in the 1990s, mid-2023 to 2024-25.",
        "I paid $1349.99, 1,250 euros, £2000-2500 and 64.50 before; it cost 1349.",
        "At 17:40, 9:05am, 10AM-2PM, by 1730.",
        "We are 1500 people, 20000 strong, 5183 miles away, 1080p on 5GHz, 1920x1080, 10000th.",
        "REFUND me ASAP, I want a REPLACEMENT NOW",
        "COVID-19 and Windows11 and step10, 24/7, 10-15 minutes, 2-3 days, 3G/4G/5G",
        "Flight 12, seat 14C, room 318, gate B12.",
        "My phone is an iPhone 15 and the other a Galaxy A54",
        "within 24HOURS",
        "2024年に買いました",
        "what @ all",
    ],
)
def test_what_is_known_or_no_identifier_passes(text: str) -> None:
    assert not rejects("unknown_identifier", text)


def test_identifiers_are_known_from_whoever_said_them() -> None:
    said = talk(
        ("agent", "Your reference is QX7-RTM, phone (555) 010-2345."),
        ("customer", "And the old one was LB 60931; write to me@mail.example"),
        ("tool", "{'imei': '356938035643809'}"),
    )
    for text in ["qx7rtm", "555-010-2345", "5550102345", "LB-60931", "60931", "ME@mail.example", "356938035643809"]:
        assert not rejects("unknown_identifier", text, said), text
    assert rejects("unknown_identifier", "QX7RTN", said)


def test_a_thought_that_a_harness_echoes_makes_nothing_known() -> None:
    """Fault 15: ``reasoning_content`` of earlier turns is no part of the conversation."""
    echoed = read_messages([{"role": "assistant", "content": "Where is it?", "reasoning_content": "order W2378156"}])
    assert rejects("unknown_identifier", "It's W2378156.", Conversation(tuple(echoed)))


def test_without_a_conversation_nothing_is_unknown() -> None:
    assert failed_guard("It's W2378156.", GUARDS) is None


@given(
    st.from_regex(r"[A-Z]{2}[0-9]{4,8}", fullmatch=True), st.sampled_from(["{}", "#{}", "It's {}.", "({})", "{}, yes"])
)
def test_an_identifier_is_unknown_until_it_was_said(identifier: str, form: str) -> None:
    text = form.format(identifier)
    assert unknown_identifiers(text, flat_text(["The order is late."]))
    for said in (
        identifier,
        identifier.lower(),
        f"{identifier[:2]}-{identifier[2:]}",
        f"{identifier[:2]} {identifier[2:]}",
    ):
        assert not unknown_identifiers(text, flat_text(["One.", f"Your order {said} is late."]))


# --- the instruction's wording ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "You are a user talking to an agent of a shop.",
        "Well: you want to exchange it for a less bright one, paid with the card.",
        "Your desk lamp from order #W100 is too bright and you want to exchange it",
        "Just write a single line at a time, the way a shopper types.",
        "never tell everything at once, what the present step asks",
        "Sure! When your goal is reached, send a message of its own? When your goal is reached send STOP as a message",
    ],
)
def test_the_instructions_own_words_are_a_leak(text: str) -> None:
    assert rejects("instruction_leak", text.replace("send STOP", "send ###STOP###"))


@pytest.mark.parametrize(
    "text",
    [
        "I am Mei Kovacs, user id mei_kovacs_8020, zip code 28236.",
        "My desk lamp from order #W100 is too bright and I want to exchange it for a less bright one.",
        "I'd like to exchange it for a less bright one, paid with the card ending in 4471.",
        "You want to exchange what?",
        "Your shop is great.",
        "I will send a single line.",
    ],
)
def test_facts_and_first_person_are_no_leak(text: str) -> None:
    assert not rejects("instruction_leak", text)


# --- the rest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["What?!!!!!!", "!!!!!!", "Yes! ! ! ! ! !", "#$%^&*()(*&^%$ no", "refund -------"])
def test_runaway_punctuation_is_rejected(text: str) -> None:
    """Fault 16."""
    assert rejects("punctuation", text)


@pytest.mark.parametrize("text", ["What?!", "Hm... well...", "???", ":-) :-)", "Is it 14C, 15C, 16C (or 17C)?", "..."])
def test_a_persons_punctuation_passes(text: str) -> None:
    assert not rejects("punctuation", text)


def test_loops_are_broken() -> None:
    assert rejects("broken", "I want it I want it I want it now") and not rejects("broken", "No, no, no!")


def test_the_agents_words_are_a_role_flip() -> None:
    """Fault 19."""
    assert rejects("role_flip", "Confirm that you actually want to cancel these flights.")
    assert not rejects("role_flip", "Confirm that you cancelled these flights.")


def test_a_customers_whole_episode_passes() -> None:
    lines = [
        HELLO,
        ("customer", "Hi, my desk lamp is far too bright. I'd like a less bright one."),
        ("agent", "Sure. Could you please provide your order number and zip code?"),
        ("customer", "It's #W100, and the zip is 28236. I'm Mei Kovacs."),
        ("agent", "Thank you, Mei. I can exchange it for the dim lamp, paid with card 4471. Do you confirm (yes/no)?"),
        ("customer", "Yes, please."),
        ("agent", "Done! The new one ships tomorrow. Is there anything else I can help you with?"),
        ("customer", "###STOP###"),
    ]
    for i, (speaker, text) in enumerate(lines):
        if speaker == "customer":
            assert failed_guard(text, GUARDS, talk(*lines[:i])) is None, text


@pytest.mark.parametrize("trait", known_traits())
def test_no_shipped_response_is_rejected_in_its_context(trait: str) -> None:
    """People wrote these: a guard that rejects one would take the trait for a fault."""
    for pair in load_pairs(trait).pairs:
        turns = tuple(pair.context)
        said = [(turn.text, turns[:i]) for i, turn in enumerate(turns) if turn.speaker == "customer"]
        for text, before in [(pair.positive, turns), (pair.negative, turns), *said]:
            for guard in GUARDS:
                assert guard.passes(text, Conversation(before)), (guard.name, pair.id, text)


# --- choosing ---------------------------------------------------------------------------------------------------------


def test_guards_can_be_switched_off_one_by_one() -> None:
    assert choose_guards({}) == GUARDS == choose_guards(dict.fromkeys(BY_NAME, True))
    assert [guard.name for guard in GUARDS if not guard.sendable] == ["empty", "thought", "special_token"]
    for name in BY_NAME:
        assert choose_guards({name: False}) == tuple(guard for guard in GUARDS if guard.name != name)
    assert choose_guards(dict.fromkeys(BY_NAME, False)) == ()


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"role_flips": False}, "unknown guard 'role_flips'; known: empty, thought, "),
        ({"empty": 0}, "guard empty must be true or false, not 0"),
        ({"empty": "no"}, "guard empty must be true or false, not 'no'"),
        ({"empty": None}, "not None"),
        (["empty"], "guards must map names to true or false"),
        (False, "guards must map names"),
        ({3: True}, "unknown guard 3"),
    ],
)
def test_what_is_no_switch_is_an_error_naming_it(switches: Any, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        choose_guards(switches)


def test_names_are_fit_for_metrics_and_json() -> None:
    assert len(BY_NAME) == len(GUARDS) and all(re.fullmatch(r"[a-z]+(_[a-z]+)*", name) for name in BY_NAME)


def test_the_first_guard_that_rejects_is_named() -> None:
    long, odd = Guard("long", lambda text, _: len(text) < 9), Guard("odd", lambda text, _: len(text) % 2 == 0)
    assert failed_guard("seven..", (long, odd)) is odd and failed_guard("twelve chars", (long, odd)) is long
    assert failed_guard("even", (long, odd)) is None and failed_guard("", ()) is None


# --- any text, in time ------------------------------------------------------------------------------------------------

SPEAKERS = st.sampled_from(["system", "agent", "customer", "tool"])
PIECES = st.sampled_from(
    [
        "###STOP###",
        "##",
        "<think>",
        "User Response:",
        "your order",
        "W123",
        "1",
        "you are",
        "\n- do",
        '"',
        "’",
        " ",
        "@",
    ]
)
TEXTS = st.one_of(st.text(), st.lists(st.one_of(PIECES, st.text(max_size=3))).map("".join))
CONVERSATIONS = st.builds(
    Conversation,
    st.lists(st.builds(Turn, SPEAKERS, TEXTS), max_size=5).map(tuple),
    st.sampled_from([(), TOKENS, ("<<X>>",), ("", " ", "a")]),
)


@settings(max_examples=300, deadline=None)
@given(TEXTS, CONVERSATIONS)
def test_no_guard_raises_on_any_text_and_conversation(text: str, conversation: Conversation) -> None:
    failed_guard(text, GUARDS, conversation)
    for guard in GUARDS:
        assert guard.passes(text, conversation) in (True, False)
        if guard.last_resort:
            cut = guard.last_resort(text, conversation)
            if guard.name != "stop_early" or cut not in conversation.legal_tokens:
                assert not (conversation.token_pattern and conversation.token_pattern.search(cut))
            rest = iter(text)
            assert all(character in rest for character in cut if not character.isspace())  # it only takes away
    named_stop_tokens(text)


ADVERSARIAL = (  # repeated to fill a text, one by one
    'a| |\n|#|# |#A|##A|A##|<|< |"|“|1|1 |1,|1.|1-|11 |(11|a1-|a@|@|a.|$1|$|-|_|a_1|?|. |? |é|\u200b|\u0301|<s |[[A|<<A'
    "|i |i will |your |you are |thank you for |the user |okay |would you like to |- do |your order a |let me check a "
    "|is that a |said |paid |at 11|agent:\n|user: a\n|say <END> |__A|***A|is done. is that ok? |sorry for the wait |"
    "ab cd ef gh |555 010 2345, |x W123 "
)


def test_every_guard_takes_linear_time() -> None:
    """100 kB of anything: milliseconds. A pattern that backtracks takes minutes."""
    for piece in ADVERSARIAL.split("|"):
        text = (piece * (100_000 // len(piece)))[:99_990] + " e\x00§"
        conversation = talk(("customer", text[:20_000]), ("agent", text[:20_000]), system=text[:20_000])
        for guard in GUARDS:
            begin = time.perf_counter()
            guard.passes(text, conversation)
            if guard.last_resort:
                guard.last_resort(text, conversation)
            assert time.perf_counter() - begin < 2, (guard.name, piece)


def test_what_depends_on_the_conversation_alone_can_be_worked_out_before() -> None:
    prepared = talk(HELLO, ASKED)
    prepared.prepare()
    before = dict(vars(prepared))
    for guard in GUARDS:
        guard.passes("###STOP### I want my lamp, order #W100.", prepared)
    assert vars(prepared).keys() == before.keys() >= {"known", "instruction_words", "rule_words", "awaited"}
    assert prepared == talk(HELLO, ASKED)


def test_a_turn_is_judged_within_milliseconds() -> None:
    """100 words after 40 turns; the guards run in the engine's thread. The bound leaves room for slow cores."""
    pairs = load_pairs("impatience").pairs
    lines = [(speaker, pairs[i].positive) for i in range(20) for speaker in ("agent", "customer")]
    conversation = talk(*lines)
    text = " ".join(pair.negative for pair in pairs[20:23])
    assert 90 < len(text.split()) < 150
    took = []
    for _ in range(5):
        begin = time.perf_counter()
        for guard in GUARDS:
            guard.passes(text, conversation)
        took.append(time.perf_counter() - begin)
    assert min(took) < 0.02
