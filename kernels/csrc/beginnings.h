// Tokens that several decodes of a step read from the same slots: requests that begin alike share blocks. Attention
// goes over them once for all of these decodes, and then for each over what is its own.
#pragma once
#include <cstdint>
#include <vector>

#include "spans.h"

namespace ISA {

struct Beginning {
    int64_t tokens, first, count;  // its members are members[first] .. members[first + count]
};

// Types of this namespace, since the linker keeps one instance of std::vector<int> for all instruction sets.
struct Member {
    int32_t span;
};

struct Share {
    int64_t tokens, place;  // the tokens that a span has in common with others, and its place among the members
};

class Beginnings {
  public:
    std::vector<Beginning> all;
    std::vector<Member> members;

    // Finds the beginnings of a step; a query may see its last `window` tokens alone.
    void find(const Spans& spans, int64_t window);
    // Returns the tokens that a span shares with others, and its place among the members; 0 where it is none.
    int64_t tokens(int64_t span) const { return all.empty() ? 0 : shares[span].tokens; }
    int64_t place(int64_t span) const { return shares[span].place; }

  private:
    std::vector<Share> shares;
    void add(const Member* spans, int64_t count, int64_t tokens);
};

}  // namespace ISA
