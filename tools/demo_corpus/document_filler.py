"""Sentences that make a document longer and say nothing of its facts, a sentence on each line."""

from __future__ import annotations


def _sentences(text: str) -> tuple[str, ...]:
    return tuple(text.strip().splitlines())


LETTER_FILLER = _sentences("""
Thank you for your kind message.
I hope that you and your family are well.
We were glad to hear from you again.
I have read your last message with great interest.
Please let me know if anything is unclear.
My colleagues and I have talked about this at length.
We would like to find a solution that works for everyone.
It would help us a great deal to know what you think.
I am sorry that it took me so long to write.
You can reach me in the office on most mornings.
If you prefer, we can also talk about it on the phone.
I will gladly send you more details if you need them.
Some of our neighbours have asked the same question.
We have not yet made a final decision.
The matter is not urgent, but we would like to settle it soon.
I have added a short note with the main points.
A copy of this letter is kept in our files.
We know that this may cause you some extra work.
There are a few things that we should discuss in person.
Several members of the group have offered to help.
So far, the costs have been lower than we feared.
The first ideas came from the people who live nearby.
I spoke with the manager, and she agrees with the plan.
We have looked at three offers and liked the second one best.
As far as I can see, there is no risk for you.
Please show this letter to anyone who may be interested.
The work should not disturb you very much.
We will of course keep you informed.
I remember our last meeting with pleasure.
Your advice was very useful to all of us.
It is important to me that nobody feels left out.
If you have any doubts, please tell me openly.
The rest of the papers will follow in a separate envelope.
We can also meet at a place that suits you better.
Last year we had a similar case, and it ended well.
I would be grateful for a short answer.
Please excuse the short notice.
The committee has asked me to thank you for your help.
You do not have to decide everything at once.
We are always glad to hear your ideas.
We value your opinion and will treat it with care.
For now, everything will stay as it is.
I have enclosed a small plan that shows the details.
Perhaps you know someone who could give us a hand.
It has been a busy season for all of us.
Whatever you decide, we will respect it.
""")

INVOICE_FILLER = _sentences("""
Thank you for your business.
Please quote the invoice number with your payment.
All goods remain our property until they are paid for.
Payment is possible by bank transfer or by card.
We do not accept cheques.
The goods were packed by hand and checked before they left our store.
Please tell us at once if anything is missing or damaged.
Our terms of sale are printed on the back of this page.
Prices include packing and delivery.
No discount was given on this sale.
Late payments may cause a small extra charge.
Please keep this document for your records.
If you have already paid, please ignore this message.
Our office is open from Monday to Friday.
Questions about this invoice can be sent to our accounts team.
A copy of this invoice was sent by email.
Unused goods may be returned in their original packing.
The goods were handed over in good condition.
We thank you for your trust and hope to serve you again.
Please check that your address is still correct.
Bank charges are to be paid by the buyer.
This invoice was made by a computer and is valid without a signature.
We offer a repair service for everything that we sell.
Our new catalogue is now available in the shop.
The warranty covers faults in material and work.
The warranty does not cover normal wear.
Damage caused by wrong use is not covered.
The delivery note was signed by a member of your staff.
Please do not send cash by post.
You will receive a receipt as soon as your payment has arrived.
We work with local makers wherever this is possible.
The packing can be returned to us free of charge.
Tax is included where it applies.
Regular buyers can ask us for a monthly account.
If you need the invoice in another form, please contact us.
The goods must be kept in a dry place.
Spare parts can be ordered at any time.
Our driver left the parcels at the main entrance.
You can also pay at the desk in our shop.
We are happy to answer any question on the phone.
Complaints should be made in writing.
Our bank details have not changed since last year.
Please use one transfer for each invoice.
The price was agreed in advance.
Partial payments are only possible if we have agreed to them.
Any balance in your favour will be paid back to you.
""")

ORDER_FILLER = _sentences("""
Please confirm this order in writing.
Please call before you deliver.
The entrance for deliveries is at the back of the building.
Someone will be there to receive the goods.
Please pack the goods in strong boxes.
We would like one delivery and not several small ones.
Please do not replace the goods with a similar product.
If something is out of stock, please tell us as soon as possible.
The goods should have the same quality as last time.
We have ordered from you before and were always satisfied.
The invoice should be sent by email.
Please put the order number on every box.
The driver can park in front of the main door.
There is a lift, but it is rather small.
A signature is needed when the goods are handed over.
We will check the goods when they arrive.
Damaged goods will be sent back.
Please use as little plastic packing as possible.
The colour should match the sample that you sent us.
We need the goods for a new room in our building.
Please let us know the name of the driver in advance.
This order was approved by our purchasing team.
The price was taken from your current list.
Shipping is included in the price.
Please do not leave the goods outside.
If nobody opens the door, please ring the bell next to it.
We can store the goods for a short time if needed.
Please include a delivery note.
Instructions for use should be in the box.
We may order more if the quality is good.
Changes to this order must be made in writing.
The order can be cancelled until the goods are sent.
We pay after the goods have arrived.
Please send a message when the parcel is on its way.
Our staff can help to unload the goods.
A pallet can be taken back at once.
Please keep the parts together in one parcel.
The goods are a gift, so please remove the price tags.
We do not need any spare parts at the moment.
The warehouse is closed at the weekend.
Please tell us how the goods should be cleaned.
All labels should be easy to read.
Heavy boxes should be marked clearly.
Thank you for your quick and friendly service.
The terms that we agreed on last year still apply.
We would also be glad to receive your new catalogue.
""")

REPORT_FILLER = _sentences("""
The weather was dry for most of the period.
No accidents were reported.
All safety rules were followed.
The team met every week to discuss open questions.
Most of the material was delivered without damage.
Some tools had to be replaced.
The neighbours were informed about the noise in good time.
A small leak was found and repaired at once.
The main risk is a lack of skilled workers.
The client visited us twice and asked for minor changes.
The drawings were updated after the last meeting.
Tests of the ground showed no surprises.
The cost of material has risen slightly.
The cost of labour has stayed the same.
All invoices were checked and paid.
A local company provides the machines.
The work on the outer walls went well.
The electrical system was tested and works as planned.
Several old parts could be used again.
Waste is collected and sorted every day.
The photographs show the current condition.
Access for visitors is limited for safety reasons.
The team used the quiet weeks to train new members.
We suggest that the plan is checked once more by an expert.
The results of the last tests are better than expected.
One supplier could not keep to the terms and was replaced.
The new supplier works quickly and carefully.
Traffic in the area was not disturbed.
Two short meetings were held with the local council.
The council supports the work and raised no objections.
Heavy rain stopped the outdoor work for a few days.
The indoor work went on without a break.
All permits have been granted.
The storage area is large enough for now.
A list of open tasks was sent to everyone.
The quality of the work was checked by an outside engineer.
The small faults that were found have been put right.
The workers asked for better lighting in the evening.
New lamps were installed near the entrance.
Energy use was lower than in the same period last year.
The plan for the coming weeks remains unchanged.
It is too early to judge the long-term effects.
The public has shown a lot of interest in the work.
The local newspaper printed a friendly article.
More details can be found in the files of the office.
The team thanks all partners for their support.
""")
