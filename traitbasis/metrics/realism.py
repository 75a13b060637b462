"""Is this the customer speaking? The commonest failure of small user simulators is a role flip: a turn that a support
agent would write.

A rule on the text alone, so that it can be read and argued with: things only the company's side says. What a customer
may say too ("sorry for the confusion", "can I have your name?", "is there anything else you need from me?") is left
alone, and so is what a customer quotes or reports. A turn that speaks from the agent's side in the customer's words
passes. It catches three in five of what the embedded model writes as an agent; ``tests/test_metrics.py`` has figures.
"""

from __future__ import annotations

import re

# What only the customer has, and only the agent calls "your".
_DATA = (
    r"(?:(?:order|booking|reservation|account|membership|member|user|customer|patient|loyalty|passport|card"
    r"|frequent flyer)(?: \w+)? (?:numbers?|ids?|code|reference|username)|booking reference|zip ?code|post ?code"
    r"|date of birth|(?:billing|shipping|delivery) address|identity|last four digits|profile)"
)
_CASE = (
    r"(?:order|refund|request|return|booking|reservation|appointment|claim|subscription|membership|replacement"
    r"|cancellation|exchange|account|package|parcel|payment|complaint|prescription|card|bill|reading|address|upgrade)"
)
_DONE = (
    r"(?:cancel+ed|processed|refunded|updated|confirmed|shipped|approved|received|submitted|scheduled|created|placed"
    r"|delivered|registered|eligible|issued|booked|denied|completed?|on (?:its|the) way|rescheduled|changed|moved"
    r"|resolved|arrive|out for delivery|sent|frozen|blocked|reviewed|escalated|logged|recorded|credited|upgraded"
    r"|important to us|set up|all set)"
)
_I = (
    r"(?:i|we)(?:'ll|'ve|'m|'re|'d| will| have| can| am| are| would| could)?"
    r"(?: (?:also|now|just|already|gone|gladly|certainly))?"
)
_HANDLE = (
    r"(?:process|refund|issue|update|initiat|escalat|arrang|submitt?|schedul|transferr?|upgrad|credit|verif|locat|waiv"
    r"|expedit|dispatch|appl|rebook|reissu|reset|unlock|mov|chang|book|cancell?)(?:e|es|ed|ing|y|ied)?"
)
# Courtesy is a customer's where it goes on so: "..., my user id is", "..., I'm looking for the order number".
_NOT_MINE = (
    r"(?![^?]{0,40}\b(?:my (?:(?!support|system|\w+ing)\w+ )?(?:ids?|numbers?|order|booking|reservation|account|e-?mail"
    r"|card|address|receipt|invoice|phone|zip|postcode|password|username|reference)\b|(?:looking|searching) for"
    r" (?:the|my) (?:\w+ )?(?:numbers?|ids?|code|reference|receipt|invoice|card|letter|e-?mail)\b))"
)
_THANKS = r"thank(?:s| you)(?: (?:so much|very much|again))? for "

_OFFERS = (
    r"how (?:can|may|could|might) (?:i|we) (?:help|assist|be of|serve|direct|make your day)"
    r"(?! (?:you )?(?:to )?(?:find|speed|fix))",
    r"what can (?:i|we) (?:do for you|help|assist)",
    r"(?:i|we)(?:'m|'re|'d be|'ll be| am| are| would be| will be) (?:here|glad|happy|able|more than happy|pleased)"
    r" to (?:help(?! with (?:a|the) survey)|assist|look into|ensure)",
    r"(?:glad|happy) (?:that )?you (?:reached|contacted|called|asked)",
    r"(?:can|could|may|let) (?:i|me|us|we) (?:help|assist) you(?! (?:to )?(?:find|speed|fix))",
    r"i(?: can|'ll| will) (?:certainly |definitely |gladly )?(?:help|assist) (?:you|with (?:that|this|any|your))",
    r"i(?:'ll| will) be (?:helping|assisting)",
    r"(?:best|designed|love|like) to (?:help|assist) you",
    r"assist you\b",
    r"let me (?:transfer|connect|escalate|pull up)",
    r"see what (?:i|we) can do",
    r"(?:let me|i(?:'ll| will| can)) (?:check|look into|look|review|find) (?:that|this|it)(?: up)? for you",
    rf"{_I} (?:go ahead and |ahead and )?{_HANDLE} (?:\w+ ){{0,3}}?your (?:new |updated )?{_CASE}",
    rf"{_I} (?:\w+ )?{_HANDLE} (?:\w+ ){{0,4}}for you\b",
    r"i(?:'ve| have) (?:booked|put|moved|added|switched|scheduled|rebooked) you\b",
    r"i can (?:offer|send) (?:you )?an? (?:\W?\w+ )?(?:replacement|voucher|refund|credit|label|discount)",
    r"i(?:'m| am|'ll| will) (?:now )?(?:transfer|connect|forward)(?:ring|ing)? you",
    r"is there (?:anything|something) else (?:that )?(?:i|we) can (?:help|do|assist)"
    r"(?! on my| from my| to (?:help|speed))",
    r"anything else (?:that )?you(?:'d| would)? (?:like|need) (?:help|assistance|me to|us to)",
    r"(?:feel free|don't hesitate|do not hesitate) to (?:ask|contact us|reach out(?! to me)|let us know)",
    r"let (?:me|us) know if you (?:have|need) (?:any )?(?:other|further|more|additional) (?:questions|help|assistance)",
    r"so (?:that )?(?:i|we) can (?:look (?:it|you) up|process (?:it|this|your)|locate|assist|help you)",
    r"tell me what you need(?! from)",
    r"unable to (?:assist|help\b|access your|provide you)",
    r"if you need (?:any |further |more |additional )*(?:help|assistance)",
    r"(?:i|we)(?:'ll| will) (?:process|handle|deliver|issue|arrange|approve) (?:the|a) (?:refund|replacement|credit"
    r"|cancellation)",
)
_COMPANY = (
    r"our (?:return |refund |cancellation |privacy )?(?:policies|systems?|records|database|website|representatives?"
    r"|specialists?|technicians?|warehouse|branch(?:es)?|stores|customers|terms|guidelines|products|services|apologies"
    r"|(?:\w+ )?department|support|(?:support|billing|pharmacy|claims|customer \w+) team|customer (?:service|support))",
    r"our (?:return|refund|cancellation|privacy) policy",
    r"our policy (?:is|does|do|states?|allows?|requires?|says|only)",
    r"our (?:\w+ )?team (?:will|is|can|has|reviews|handles)",
    r"(?:per|as per|according to|under|against) our",
    r"my (?:support team|customer (?:service|support))",
    rf"{_THANKS}(?:contacting|calling|reaching(?: out)?|chatting)(?! me| back)",
    rf"{_THANKS}(?:choosing|shopping|holding|being (?:a|our)|letting us know)",
    rf"{_THANKS}your (?:patience(?! with me){_NOT_MINE}|inquiry|enquiry|interest|order|business|purchase|loyalty)",
    rf"{_THANKS}(?:providing|confirming|sharing|sending|verifying) (?:\w+ ){{0,2}}your",
    r"(?:sorry|apologi[sz]e|apologies) for (?:the|any|this|your)(?: \w+)? (?:inconvenience|loss|frustration)\b",
    rf"(?:sorry|apologi[sz]e|apologies) for (?:the|any|this|your)(?: \w+)? wait\b{_NOT_MINE}",
    r"(?:sorry|apologi[sz]e|apologies) for (?:the|any|this) inconvenience",
    r"sorry for your (?:loss|trouble|frustration|experience)",
    r"sorry to hear (?:about (?:your|the)|(?:that )?(?:you|your|the))",
    r"i (?:completely |totally |fully )?understand (?:your (?:frustration|disappointment)|how (?:frustrating|upsetting)"
    r"|(?:that )?you(?:'re| are) (?:frustrated|upset|having|experiencing))",
    r"as (?:an ai\b|a language model|an? (?:virtual |ai )assistant|your (?:agent|assistant|representative))",
    r"i(?:'m| am) (?:an ai\b|(?:an?|your) (?:virtual|automated|ai) (?:assistant|agent)|an assistant(?! \w+))",
    r"customer service representative at",
    r"i(?:'m| am) (?!\w+ing)\w+ (?:from|with|at) (?:the )?(?:\w+ ){0,3}(?:support|team|customer \w+|help ?desk)\b",
    r"(?:support|desk|care|team|services?|billing),? \w+ speaking",
    r"you(?:'re| are) (?:now )?(?:chatting|speaking) with (?!an? |me\b|the |some)",
    r"we (?:offer|value (?:you|your)|do(?:n't| not) (?:offer|cover|allow|ship|issue)|can offer"
    r"|only (?:offer|ship|accept))",
    r"we appreciate your (?:business|loyalty|patience)",
    r"we(?:'ll| will) (?:send you|email you|get back to you|refund (?:you|your)|fix it|do (?:everything|our best))",
    r"we (?:are|'re) (?:currently )?experiencing (?:a |an )?(?:high|unusual)",
    r"we have received your (?!letter|email|message)",
    r"(?:(?:sorry|regret|pleased) to|must) inform you",
    r"(?<!if )you are (?:a|the) customer(?![ -]?(?:service|focus|care))",
)
_REQUESTS = (
    rf"your {_DATA}",
    r"(?:provide|confirm|verify|share|give|enter|looking for)(?: me| us)?(?: with)? your (?:name and|name\b|first|last"
    r"|full name(?! and (?:employee|badge))|order\b|account|e-?mail|phone|(?:home |current )?address|booking"
    r"|reservation|contact details)(?!(?: \w+)? so (?:that )?(?:i|we) can (?:send|forward|mail|e-?mail))",
    r"(?:provide|confirm|share|have|give me|need|is) your (?:tracking|agreement|claim|ticket|serial|invoice|meter|visit"
    r"|policy) number",
    r"(?:describe|explain) your (?:request|issue|problem|concern)",
    r"(?:may|could|can) i (?:please )?(?:have|get|ask for) (?:your (?:full|order|booking|account|e-?mail|phone"
    r"|name and)|the (?:last four|account|booking|order|reservation|member\w*) )",
    r"what(?:'s| is) (?:your (?:order|booking|reservation|account|enquiry|inquiry|concern)\b"
    r"(?! (?:\w+ ){0,2}(?:polic(?:y|ies)|process|procedure|fees?|rules?|limits?|terms|hours|deadline|times?)\b)"
    r"|the (?:order|booking|reservation|account|member) (?:number|id|reference))(?! for (?:this|my))",
    r"for (?:security|verification) (?:purposes|reasons)",
    r"what e-?mail (?:address )?(?:did you|is (?:on|linked|associated))",
    r"(?:confirm|verify) (?:that |if |whether )?you(?:'d like| (?:\w+ly |do |indeed |still )?(?:want|wish|would like))",
    r"to (?:proceed|confirm|continue|go ahead),? (?:please )?(?:reply|respond|type|say|answer) ",
    r"(?:reply|respond|answer) (?:with )?\"?yes\"? (?:and|to)",
    r"(?:would you like|do you want) (?:me|us) to (?:proceed|cancel|process|refund|issue|transfer|escalate|schedule"
    r"|help|assist|arrange|apply|place|submit|initiate|connect|book|rebook|reset)(?!(?: \w+){0,2} my)",
    r"would you (?:like|prefer) (?:to (?:proceed|cancel|keep|exchange|receive|reschedule|continue|add|upgrade|return"
    r"|book|change|move|switch|pay|choose|speak|do that)|an? (?:refund|replacement|voucher|exchange)|the refund|your"
    r"|store credit|(?:that|it)(?: instead)?\?)",
    r"do you (?:want|wish) to (?:proceed|cancel|exchange|reschedule|return|keep (?!me|my|us))",
    r"do you need (?:any )?(?:further |more |additional )?(?:assistance|help (?:with|finding))",
    r"shall (?:i|we) (?:apply|begin|submit|book|post|add|(?:go ahead|proceed)(?! and (?:return|send|pay|ship|throw)))",
    r"should i (?:book|submit|process) (?:it|that|this)",
    r"which (?:one |of \w+ )?(?:do|would) you prefer",
    r"how would you like (?:to (?:proceed|pay|receive)|your|us to|the refund)",
    r"what would you like (?:to (?:do|change|order|book|sort|exchange|return)|help|assistance)",
    r"(?:which|what)(?: \w+){0,4} would you like to (?:change|cancel|return|exchange|move|book|order|keep)",
    r"what (?:seems|appears) to be the",
    r"what brings you",
    r"what do you need (?:today|help)",
    r"have you (?:already )?tried (?:re\w+ing|turning|unplugging|clearing|logging|updating)",
    r"are you (?:an? (?:\w+ )?(?:member|patient|subscriber|cardholder) (?:of|with|at)|an existing customer"
    r"|(?:calling|writing|contacting us) about)",
    r"when (?:did you|you) (?:place|purchase|buy|bought|moved?)\b(?! (?:it|them|this|that|these) (?:back|up|to))",
)
_REPORTS = (
    rf"your (?:new |updated |original )?{_CASE}(?: [\w#-]*\d[\w-]*| for [\w ]{{1,20}}| of \S+| ending in \d+)?"
    rf" (?:has|have|was|is|will|should|can) (?:(?:now|already|also|successfully|not|be|been|being|currently|just) )*"
    rf"{_DONE}\b",
    r"you(?:'ll| will| should)(?: (?:also|now|soon|shortly))? (?:receive|get) (?:an?|your|the) (?:\w+ ){0,2}(?:refund"
    r"|confirmation|e-?mail|text|sms|replacement|credit|voucher|notification|receipt|label|link|tracking)"
    r"(?! from m[ey])",
    r"you(?:'ll| will|'ve| have| are going to)(?: now)? (?:be|been) (?:refunded|credited|notified|reimbursed"
    r"|compensated)",
    r"you(?: are|'re)(?: not)? (?:eligible|entitled|all set)",
    r"you (?:cannot|can't|can not) (?:get|receive|have) an? (?:full )?refund",
    r"i(?: can|'ve| have)? (?:see|found|located|pulled up) (?:here )?(?:that )?(?:your (?:order|account|booking"
    r"|reservation|profile|payment|parcel|package|request|file|appointment|claim|subscription|records?)"
    r"|you(?:'ve| have)? (?:placed|ordered|booked|requested|purchased|returned))",
    r"(?:on|in|under|from) your (?:next )?(?:order|account|booking|reservation|subscription|appointment|prescription)\b"
    r"(?! (?:page|form|system|confirmation|portal|app))",
    r"in your area",
    r"(?:please )?allow (?:us|up to|\d)",
    r"(?:it looks like|it seems) your (?:order|account|subscription|payment|booking|card|membership)",
    r"(?:it|that|this) will cost you|is waived for you",
)
_GREETING = r"^(?:(?:hi|hello|hey|good (?:morning|afternoon|evening|day))(?: there)?[,.!]* )?(?:and )?"
_FLIP = re.compile(
    rf"\b(?:{'|'.join(_OFFERS + _COMPANY + _REQUESTS + _REPORTS)})"
    rf"|(?:^|[.,!] )(?:and )?welcome (?:to|back)\b|{_GREETING}(?:you(?:'ve| have) reached (?!the (?:wrong|limit|end))"
    r"|you're welcome\b(?! to))"
)
# "You said your refund was approved", "the page keeps asking for your order number": a customer reporting.
_REPORTED = re.compile(
    r"(?<!\bi )(?<!\bwe )\b(?:said|says|saying|told|promised|wrote|asks|asked|asking|reads)\b[^.!?]*$"
)
_QUOTED = re.compile(r"\"[^\"]{1,300}\"|“[^”]{1,300}”")


def is_role_flip(text: str) -> bool:
    """Whether a turn speaks as the agent, or repeats the instruction's "you are a customer"."""
    spoken = _QUOTED.sub(" ", text)
    if len(spoken.split()) < 3:  # all of it is in quotation marks: a model's habit, no quotation
        spoken = text
    spoken = " ".join(spoken.replace("’", "'").lower().split())
    return any(
        not _REPORTED.search(spoken, max(0, match.start() - 80), match.start()) for match in _FLIP.finditer(spoken)
    )
