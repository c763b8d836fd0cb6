// Paged attention: writes K and V into their slots, and divides attention over the threads.
//
// Work is laid out on one line, unit after unit, each as long as it costs: its tokens times what a token costs. Each
// thread takes an equal part of the line, whatever the mix of lengths; a cut falls between two grains of tokens. A unit
// that is cut leaves a Partial with each of its threads, and the thread that has its beginning puts them together. One
// thread alone cuts nothing. Where decodes have their beginning in common there are two rounds: first the units of the
// beginnings, whose results are kept, then those of what each decode has beside, to which they are added.
#include "attention.h"

#include <omp.h>

#include <optional>
#include <vector>

#include "decodes.h"
#include "kernels.h"

namespace ISA {

// --- Writing

// Calls action(row, the slot of its K) for rows [first, end) of the step.
template <class Action>
static void each_row(const Spans& spans, int64_t first, int64_t end, Action action) {
    int64_t span = 0;
    for (int64_t row = first; row < end;) {
        while (spans.rows[span + 1] <= row) ++span;
        Places places(spans, span);
        int64_t position = spans.tokens[span] - (spans.rows[span + 1] - row);
        for (int64_t until = smaller(end, spans.rows[span + 1]); row < until; ++row, ++position) {
            int64_t slot;
            places.slots(position, 1, &slot);
            action(row, slot);
        }
    }
}

template <class T>
static void quantise_vector(const T* from, int64_t heads, int64_t head_dim, int8_t* to) {
    for (int64_t head = 0; head < heads; ++head)
        quantise_head(from + head * head_dim, head_dim, to + head * head_dim, to + heads * head_dim + head * SCALE_BYTES);
}

void write(int dtype, int kept, void* cache, int64_t kv_heads, int64_t head_dim, const void* table, const void* k,
           int64_t k_stride, const void* v, int64_t v_stride) {
    const Spans& spans = *(const Spans*)table;
    int64_t rows = spans.rows[spans.count], kv_dim = kv_heads * head_dim;
    auto write_rows = [&](int64_t first, int64_t end) {
        by_dtype(dtype, [&](auto* of) {
            auto *of_k = (decltype(of))k, *of_v = (decltype(of))v;
            if (kept == INT8) {
                int64_t vector = int8_vector(kv_heads, head_dim);
                each_row(spans, first, end, [&](int64_t row, int64_t slot) {
                    int8_t* to = (int8_t*)cache + slot * vector;
                    quantise_vector(of_k + row * k_stride, kv_heads, head_dim, to);
                    quantise_vector(of_v + row * v_stride, kv_heads, head_dim, to + spans.block_size * vector);
                });
                return;
            }
            each_row(spans, first, end, [&](int64_t row, int64_t slot) {
                auto* to = (decltype(of))cache + slot * kv_dim;
                std::memcpy(to, of_k + row * k_stride, kv_dim * sizeof(*of));
                std::memcpy(to + spans.block_size * kv_dim, of_v + row * v_stride, kv_dim * sizeof(*of));
            });
        });
    };
    int threads = rows * kv_dim < 1 << 17 ? 1 : omp_get_max_threads();
    if (threads == 1) return write_rows(0, rows);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int part = 0; part < threads; ++part) write_rows(rows * part / threads, rows * (part + 1) / threads);
}

// --- Units

constexpr int64_t TILED_ROWS = 128;
// Below this cost, about 10 microseconds, a second thread takes longer to begin than it saves.
constexpr int64_t WORTH_THREADS = 300000;

static int64_t token_cost(const Attention& a, const Unit& unit) {
    int64_t rows = unit.queries * a.group;
    return a.head_dim * (unit.tiled ? tile_cost(a.dtype, rows) : unit.kv_heads * row_cost(rows));
}

// Divides queries of a span, or queries that see the same tokens, into units. All queries of a unit lie in one stretch,
// so that what computes a unit knows of windows alone.
template <class Action>
static void divide(const Attention& a, const Unit& all, Action action) {
    bool tiled = a.latent_rank || a.both_ways() || all.queries * a.group >= least_rows_for_tiles(a.dtype);
    int64_t at_once = tiled ? larger(1, TILED_ROWS / a.group) : all.queries, heads = tiled ? 1 : a.kv_heads;
    for (int64_t head = 0; head < a.kv_heads; head += heads)
        for (int64_t query = 0, count; query < all.queries; query += count) {
            Unit unit = all;
            unit.first_kv_head = head, unit.kv_heads = heads, unit.tiled = tiled;
            count = smaller(at_once, all.queries - query);
            if (all.members) {
                unit.members += query;
            } else {
                unit.first_row += query, unit.position += query;
                const int64_t in_stretch = unit.position % a.scoring.stretch;
                count = smaller(count, a.scoring.stretch - in_stretch);
                unit.first_token = larger(larger(first_seen(a, unit.position), unit.position - in_stretch), all.first_token);
                unit.end_token = last_seen(a, unit.position + count - 1, all.end_token) + 1;
            }
            unit.queries = count;
            action(unit);
        }
}

// First the beginnings that spans have in common, then what each has beside; of that the units with few queries and those
// with many may also have rounds of their own.
enum class Round { BEGINNINGS, SPANS, FEW, MANY };

template <class Action>
static void each_unit(const Attention& a, Round round, Action action) {
    const Beginnings& beginnings = a.beginnings;
    if (round == Round::BEGINNINGS) {
        for (const Beginning& each : beginnings.all) {
            const Member* members = &beginnings.members[each.first];
            divide(a, Unit{members[0].span, 0, each.tokens, each.count, 0, 0, 0, each.tokens, false, members}, action);
        }
        return;
    }
    for (int64_t span = 0; span < a.spans.count; ++span) {
        int64_t queries = a.spans.queries(span), tokens = a.spans.tokens[span];
        divide(a, Unit{span, a.spans.rows[span], tokens - queries, queries, 0, 0, beginnings.tokens(span), tokens},
               [&](const Unit& unit) {
                   if (round == Round::SPANS || unit.tiled == (round == Round::MANY)) action(unit);
               });
    }
}

// --- Pieces

struct Line {
    Round round;
    int64_t cost = 0, most_rows = 0;
    int64_t parts;  // one for each thread

    int64_t start(int64_t part) const { return cost / parts * part + cost % parts * part / parts; }
};

static Line measure(const Attention& a, Round round) {
    Line line{round};
    each_unit(a, round, [&](const Unit& unit) {
        line.cost += (unit.end_token - unit.first_token) * token_cost(a, unit);
        line.most_rows = larger(line.most_rows, unit.rows(a));
    });
    line.parts = line.cost < WORTH_THREADS ? 1 : omp_get_max_threads();
    return line;
}

// Returns the token at which a point of the line cuts a unit; `at` counts from the beginning of the unit.
static int64_t cut(const Unit& unit, int64_t token_cost, int64_t at) {
    if (at <= 0) return unit.first_token;
    if (at >= (unit.end_token - unit.first_token) * token_cost) return unit.end_token;
    int64_t grain = unit.tiled ? TILE_GRAIN : ROW_GRAIN;
    return unit.first_token + at / token_cost / grain * grain;
}

static void finish_row(const float* from, float factor, int64_t width, int dtype, void* to, int64_t offset) {
    by_dtype(dtype, [&](auto* of) {
        auto* row = (decltype(of))to + offset;
        int64_t i = 0;
        for (; i + Vec::width <= width; i += Vec::width) (Vec::load(from + i) * Vec::all(factor)).store(row + i);
        for (; i < width; ++i) narrow(from[i] * factor, row[i]);
    });
}

static void put_together(Partial into, Partial more, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; ++row) {
        float most = into.max[row] > more.max[row] ? into.max[row] : more.max[row];
        float into_factor = std::exp(into.max[row] - most), more_factor = std::exp(more.max[row] - most);
        into.max[row] = most;
        into.sum[row] = into.sum[row] * into_factor + more.sum[row] * more_factor;
        float* to = into.out + row * width;
        const float* from = more.out + row * width;
        for (int64_t i = 0; i < width; ++i) to[i] = to[i] * into_factor + from[i] * more_factor;
    }
}

// The results of the beginnings: those of a member's heads lie one after another.
struct Common {
    float* memory;
    Partial at(const Attention& a, int64_t place, int64_t head) const {
        Partial all = partial_at(memory, int64_t(a.beginnings.members.size()) * a.heads, a.value_dim());
        int64_t row = place * a.heads + head;
        return {all.out + row * a.value_dim(), all.max + row, all.sum + row};
    }
};

static void keep(const Attention& a, const Unit& unit, Partial done, Common common) {
    int64_t row = 0, place = unit.members - a.beginnings.members.data();
    for (int64_t head = unit.first_kv_head; head < unit.first_kv_head + unit.kv_heads; ++head)
        for (int64_t query = 0; query < unit.queries; ++query, row += a.group) {
            Partial kept = common.at(a, place + query, head * a.group);
            std::memcpy(kept.out, done.out + row * a.value_dim(), a.group * a.value_dim() * sizeof(float));
            std::memcpy(kept.max, done.max + row, a.group * sizeof(float));
            std::memcpy(kept.sum, done.sum + row, a.group * sizeof(float));
        }
}

// Returns what a row's sum is multiplied with; a sink takes its part of the weight, and adds nothing.
static float share(const Attention& a, Partial done, int64_t row, int64_t head) {
    float sink = a.scoring.sinks ? std::exp(a.scoring.sinks[head] - done.max[row]) : 0;
    return 1 / (done.sum[row] + sink);
}

static void finish(const Attention& a, const Unit& unit, Partial done, Common common) {
    if (unit.members) return keep(a, unit, done, common);
    if (a.beginnings.tokens(unit.span))
        put_together(done, common.at(a, a.beginnings.place(unit.span), unit.first_kv_head * a.group), unit.rows(a),
                     a.value_dim());
    int64_t row = 0;
    for (int64_t head = unit.first_kv_head * a.group; head < (unit.first_kv_head + unit.kv_heads) * a.group;
         head += a.group)
        for (int64_t query = 0; query < unit.queries; ++query)
            for (int64_t member = 0; member < a.group; ++member, ++row)
                finish_row(done.out + row * a.value_dim(), share(a, done, row, head + member), a.value_dim(), a.dtype,
                           a.out, ((unit.first_row + query) * a.heads + head + member) * a.value_dim());
}

// `next`: what this thread goes over after it, or null.
static void attend_piece(const Attention& a, const Piece& piece, const Piece* next, Partial out) {
    static thread_local Scratch scratch;
    if (piece.unit.tiled) return attend_tiles(a, piece.unit, piece.from, piece.to, out);
    attend_rows(a, piece.unit, {piece.from, piece.to, true, true, next}, scratch, out);
}

// Each part has room for two pieces of cut units: one that goes on from the part before, one that begins here.
struct Room {
    float* memory;
    int64_t width;
    Partial at(const Attention& a, const Unit& unit, int64_t part, bool begins) const {
        return partial_at(memory + (2 * part + begins) * width, unit.rows(a), a.value_dim());
    }
};

template <class Action>
static void each_piece(const Attention& a, const Line& line, int64_t part, Action action) {
    int64_t at = 0, start = line.start(part), end = line.start(part + 1);
    each_unit(a, line.round, [&](const Unit& unit) {
        int64_t cost = token_cost(a, unit), length = (unit.end_token - unit.first_token) * cost;
        if (at < end && at + length > start) {
            int64_t from = cut(unit, cost, start - at), to = cut(unit, cost, end - at);
            if (from < to) action(unit, cost, at, from, to);
        }
        at += length;
    });
}

static void list_pieces(const Attention& a, const Line& line, int64_t part, std::vector<Piece>& pieces) {
    pieces.clear();
    each_piece(a, line, part, [&](const Unit& unit, int64_t, int64_t, int64_t from, int64_t to) {
        pieces.push_back({unit, from, to});
    });
}

static void attend_part(const Attention& a, const Line& line, int64_t part, Room room, Common common) {
    static thread_local Scratch scratch;
    static thread_local std::vector<Piece> pieces;
    float* memory = (float*)scratch.at_least(partial_floats(line.most_rows, a.value_dim()) * sizeof(float));
    list_pieces(a, line, part, pieces);
    for (const Piece& piece : pieces) {
        const Unit& unit = piece.unit;
        const Piece* next = &piece == &pieces.back() || (&piece)[1].unit.tiled ? nullptr : &piece + 1;
        Partial out = piece.is_whole() ? partial_at(memory, unit.rows(a), a.value_dim())
                                       : room.at(a, unit, part, piece.begins());
        attend_piece(a, piece, next, out);
        if (piece.is_whole()) finish(a, unit, out, common);
    }
}

// The part that has the beginning of a cut unit puts its pieces together.
static void join_part(const Attention& a, const Line& line, int64_t part, Room room, Common common) {
    each_piece(a, line, part, [&](const Unit& unit, int64_t cost, int64_t at, int64_t from, int64_t to) {
        if (from != unit.first_token || to == unit.end_token) return;
        Partial whole = room.at(a, unit, part, true);
        for (int64_t next = part + 1; to < unit.end_token; ++next) {
            int64_t end = cut(unit, cost, line.start(next + 1) - at);
            if (end == to) continue;
            put_together(whole, room.at(a, unit, next, false), unit.rows(a), a.value_dim());
            to = end;
        }
        finish(a, unit, whole, common);
    });
}

static void attend_round(const Attention& a, Round round, Common common) {
    Line line = measure(a, round);
    if (!line.cost) return;
    if (line.parts == 1) return attend_part(a, line, 0, Room{}, common);
    static thread_local Scratch scratch;
    int64_t width = partial_floats(line.most_rows, a.value_dim());
    Room room{(float*)scratch.at_least(2 * line.parts * width * sizeof(float)), width};
    Guard guard;
#pragma omp parallel num_threads(int(line.parts))
    {
        // Where OpenMP gives fewer threads than were asked for, some take several parts.
        guard.run([&] {
            for (int64_t part = omp_get_thread_num(); part < line.parts; part += omp_get_num_threads())
                attend_part(a, line, part, room, common);
        });
#pragma omp barrier
        if (!guard.has_failed())
            for (int64_t part = omp_get_thread_num(); part < line.parts; part += omp_get_num_threads())
                join_part(a, line, part, room, common);
    }
    guard.pass_on();
}

static Common attend_beginnings(const Attention& a, Scratch& scratch) {
    if (a.beginnings.all.empty()) return {};
    int64_t rows = int64_t(a.beginnings.members.size()) * a.heads;
    Common common{(float*)scratch.at_least(partial_floats(rows, a.value_dim()) * sizeof(float))};
    attend_round(a, Round::BEGINNINGS, common);
    return common;
}

static void attend(const Attention& a) {
    static thread_local Scratch scratch;
    attend_round(a, Round::SPANS, attend_beginnings(a, scratch));
}

static Attention attention_of(const Queries& of, Beginnings& beginnings) {
    beginnings.find(*of.spans, smaller(of.scoring->window, of.scoring->stretch));
    int64_t vector = kv_vector(of.kept, of.kv_heads, of.head_dim);
    return {of.dtype, of.kept,  of.query,    of.row_stride, of.head_stride,         of.cache,    vector, *of.spans,
            of.out,   of.heads, of.head_dim, of.kv_heads,   of.heads / of.kv_heads, *of.scoring, beginnings};
}

void attend(const Queries& queries) {
    static thread_local Beginnings beginnings;
    attend(attention_of(queries, beginnings));
}

void attend(int dtype, const void* query, int64_t row_stride, int64_t head_stride, int64_t heads, int64_t head_dim,
            int kept, const void* cache, int64_t kv_heads, const void* table, const Scoring* scoring, void* out) {
    attend(Queries{dtype, query, row_stride, head_stride, heads, head_dim, kept, cache, kv_heads, (const Spans*)table,
                   scoring, out});
}

void attend_latent(int dtype, const void* query, int64_t row_stride, int64_t head_stride, int64_t heads, int64_t size,
                   int64_t rank, const void* cache, const void* table, float scale, void* out) {
    static thread_local Beginnings beginnings;
    constexpr int64_t ALL = int64_t(1) << 62;
    const Spans& spans = *(const Spans*)table;
    const Scoring scoring{scale, 0, ALL, nullptr, ALL};
    beginnings.find(spans, ALL);
    attend({dtype, dtype, query, row_stride, head_stride, cache, size / 2, spans,
            out,   heads, size,  1,          heads,       scoring, beginnings, rank});
}

void attend_texts(int dtype, const void* query, int64_t query_row, int64_t query_head, const void* k, int64_t k_row,
                  int64_t k_head, const void* v, int64_t v_row, int64_t v_head, int64_t heads, int64_t head_dim,
                  const int32_t* bounds, int64_t count, int64_t window, float scale, void* out) {
    static thread_local Scratch scratch;
    constexpr int64_t ALL = int64_t(1) << 62;
    const Beginnings none;
    auto* lengths = (int32_t*)scratch.at_least(count * sizeof(int32_t));
    for (int64_t text = 0; text < count; ++text) lengths[text] = bounds[text + 1] - bounds[text];
    const Spans spans{count, 1, bounds, lengths, nullptr, nullptr};
    const Scoring scoring{scale, 0, window, nullptr, ALL};
    attend({dtype, dtype, query,    query_row, query_head, nullptr, 0,    spans, out,
            heads, head_dim, heads, 1,         scoring,    none,    0,    {k, k_row, k_head}, {v, v_row, v_head}});
}

// --- Decodes, beside linear layers

// The pieces of one thread, and what it has begun: a piece of its own or, in the end, of another.
struct alignas(64) Decodes::Part {
    std::vector<Piece> pieces;
    int64_t next = 0;  // the first piece that no thread has begun
    const Piece* begun = nullptr;
    int64_t of = 0;     // the part that this piece is of
    int64_t token = 0;  // where it goes on
    std::vector<Stretch> stretches;
    Stretches ahead;
    Scratch state, memory;

    bool take(Part& from, int64_t number) {
        int64_t at = __atomic_fetch_add(&from.next, 1, __ATOMIC_RELAXED);
        bool is_any = at < int64_t(from.pieces.size());
        begun = is_any ? &from.pieces[at] : nullptr;
        if (is_any) of = number, token = begun->from;
        return is_any;
    }
    Slice slice(int64_t tokens) const {
        int64_t to = smaller(token + tokens, begun->to);
        return {token, to, token == begun->from, to == begun->to};
    }
};

struct Decodes::All {
    std::optional<Attention> attention;
    Beginnings beginnings;
    Line line;
    Common common;
    Room room;
    std::vector<Part> parts;
    Scratch of_common, of_room;
    std::optional<Guard> guard;
    int64_t token_bytes, slice_tokens;
};

Decodes::Decodes() : all(std::make_unique<All>()) {}
Decodes::~Decodes() = default;

void Decodes::begin(const Queries& queries) {
    const Attention& a = all->attention.emplace(attention_of(queries, all->beginnings));
    all->guard.emplace();
    all->common = attend_beginnings(a, all->of_common);
    Line& line = all->line = measure(a, Round::FEW);
    int64_t width = partial_floats(line.most_rows, a.value_dim());
    all->room = {(float*)all->of_room.at_least(2 * line.parts * width * sizeof(float)), width};
    all->token_bytes = a.vector * number_size(a.kept);
    all->slice_tokens = larger(ROW_GRAIN, most_ahead / (2 * all->token_bytes) / ROW_GRAIN * ROW_GRAIN);
    if (int64_t(all->parts.size()) < line.parts) all->parts = std::vector<Part>(line.parts);
    for (int64_t number = 0; number < line.parts; ++number) {
        Part& part = all->parts[number];
        part.next = 0;
        list_pieces(a, line, number, part.pieces);
        part.take(part, number);
        look_ahead(part);
    }
}

// Finds where the next slice lies: in each block a stretch of K and one of V.
void Decodes::look_ahead(Part& part) {
    part.stretches.clear(), part.ahead = {};
    if (!part.begun) return;
    const Attention& a = *all->attention;
    const Slice slice = part.slice(all->slice_tokens);
    const int64_t bytes = all->token_bytes, v_after = a.spans.block_size * bytes;
    Places places(a.spans, part.begun->unit.span);
    for (int64_t at = slice.from, count; at < slice.to; at += count) {
        count = slice.to - at;
        const char* k = (const char*)a.cache + places.side_by_side(at, count) * bytes;
        for (const char* begin : {k, k + v_after}) part.stretches.push_back({begin, begin + count * bytes});
    }
    part.ahead = {part.stretches.data(), part.stretches.data() + part.stretches.size()};
}

Stretches* Decodes::ahead(int64_t thread) {
    return thread < all->line.parts ? &all->parts[thread].ahead : nullptr;
}

void Decodes::go_on(int64_t thread) {
    Part& part = all->parts[thread];
    if (!part.begun) return;
    all->guard->run([&] {
        attend_slice(part, all->slice_tokens);
        if (part.token == part.begun->to) part.take(part, thread);
        look_ahead(part);
    });
}

void Decodes::attend_slice(Part& part, int64_t tokens) {
    const Attention& a = *all->attention;
    const Piece& piece = *part.begun;
    const Slice slice = part.slice(tokens);
    int64_t rows = piece.unit.rows(a);
    auto* memory = (float*)part.memory.at_least(partial_floats(rows, a.value_dim()) * sizeof(float));
    Partial out = piece.is_whole() ? partial_at(memory, rows, a.value_dim())
                                   : all->room.at(a, piece.unit, part.of, piece.begins());
    attend_rows(a, piece.unit, slice, part.state, out);
    part.token = slice.to;
    if (slice.ends && piece.is_whole()) finish(a, piece.unit, out, all->common);
}

void Decodes::attend_rest(int64_t thread) {
    constexpr int64_t ALL = int64_t(1) << 62;
    Part& part = all->parts[thread];
    if (part.begun) attend_slice(part, ALL);
    for (int64_t i = 0, parts = all->line.parts; i < parts; ++i)
        while (part.take(all->parts[(thread + i) % parts], (thread + i) % parts)) attend_slice(part, ALL);
}

void Decodes::end() {
    const Attention& a = *all->attention;
    const Line& line = all->line;
#pragma omp parallel num_threads(int(line.parts))
    {
        all->guard->run([&] {
            for (int64_t part = omp_get_thread_num(); part < line.parts; part += omp_get_num_threads()) attend_rest(part);
        });
#pragma omp barrier
        if (!all->guard->has_failed())
            for (int64_t part = omp_get_thread_num(); part < line.parts; part += omp_get_num_threads())
                join_part(a, line, part, all->room, all->common);
    }
    all->guard->pass_on();
    attend_round(a, Round::MANY, all->common);
}

}  // namespace ISA
