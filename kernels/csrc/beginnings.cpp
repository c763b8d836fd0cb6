#include "beginnings.h"

#include <algorithm>

namespace ISA {

// Fewer tokens, or fewer that need not be gone over again, are not worth putting two results together.
constexpr int64_t LEAST_TOKENS = 64, LEAST_SAVED = 2048;

// The blocks of a decode that others may read too: full before its own token.
struct Shareable {
    const int32_t *first, *end;

    Shareable(const Spans& spans, int64_t span)
        : first(spans.blocks + spans.starts[span]), end(first + (spans.tokens[span] - 1) / spans.block_size) {}
};

static int64_t in_common(const Shareable& a, const Shareable& b) {
    return std::mismatch(a.first, a.first + std::min(a.end - a.first, b.end - b.first), b.first).first - a.first;
}

void Beginnings::add(const Member* spans, int64_t count, int64_t tokens) {
    all.push_back({tokens, int64_t(members.size()), count});
    for (int64_t i = 0; i < count; ++i) {
        shares[spans[i].span] = {tokens, int64_t(members.size())};
        members.push_back(spans[i]);
    }
}

// Decodes in the order of their blocks: those with most in common stand beside each other. Each joins those before it
// where fewer tokens are read then.
void Beginnings::find(const Spans& spans, int64_t window) {
    all.clear(), members.clear();
    std::vector<Member> decodes;
    for (int64_t span = 0; span < spans.count; ++span)
        if (spans.queries(span) == 1 && spans.tokens[span] > LEAST_TOKENS && spans.tokens[span] + spans.count < window)
            decodes.push_back({int32_t(span)});
    std::sort(decodes.begin(), decodes.end(), [&](Member a, Member b) {
        Shareable of_a(spans, a.span), of_b(spans, b.span);
        return std::lexicographical_compare(of_a.first, of_a.end, of_b.first, of_b.end);
    });
    shares.assign(spans.count, {0, 0});
    for (size_t first = 0, next; first < decodes.size(); first = next) {
        int64_t blocks = INT64_MAX;
        for (next = first + 1; next < decodes.size(); ++next) {
            int64_t count = int64_t(next - first);
            int64_t with_next = std::min(blocks, in_common({spans, decodes[next - 1].span}, {spans, decodes[next].span}));
            if (with_next * spans.block_size < LEAST_TOKENS || (count > 1 && count * with_next < (count - 1) * blocks)) break;
            blocks = with_next;
        }
        int64_t count = int64_t(next - first);
        if (count > 1 && (count - 1) * blocks * spans.block_size >= LEAST_SAVED)
            add(&decodes[first], count, blocks * spans.block_size);
    }
}

}  // namespace ISA
