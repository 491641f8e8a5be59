// Attention over a paged cache: online softmax (Milakov & Gimelshein 2018, arXiv:1805.02867) over
// blocks of the sixteen next entries that a query sees.
//
// Blocks count the entries of a branch, not offsets, so a query's result depends on the sequence of
// entries it sees and on nothing else. A node of a tree gets the bits of plain decoding of the same
// branch:
//
//     decoding     … e14 e15 | e16 e17 e18                  e17, e18: two drafted tokens, accepted
//     in a tree    … e14 e15 | e16  ·  e18  ·   ·  e21      the same two after rejected siblings
//                      block | block: three entries, whatever lies between them
//
// Whole blocks that every query of a tile sees are packed once for all of them; the rest, up to two
// blocks when decoding, each query gathers for itself. Unseen entries are never loaded.
#include "kernels.h"

#include <vector>

namespace {

constexpr int64_t kBlock = 16;   // entries scored at once, one a lane; divides a page
constexpr int64_t kWindow = 64;  // bits of a mask
constexpr int64_t kTile = 16;    // most queries that share packed blocks
constexpr int64_t kSerialWork = 1 << 15;
#ifdef __AVX512F__
constexpr int64_t kHeads = 4;  // heads that a block is folded into at once: what registers hold
#else
constexpr int64_t kHeads = 2;
#endif

struct Problem {
    const Act* query;            // [tokens, heads, size]
    const Act *keys, *values;    // [pages, groups, kPage, size]
    const Metadata& m;
    Act* mixed;                  // as query
    int64_t heads, groups, size;
    int64_t shared_heads() const { return heads / groups; }
    int64_t padded() const { return (size + 31) / 32 * 32; }
    int64_t steps() const { return kDots ? size / 2 : size; }
    int64_t count(int64_t row) const { return m.cu_seqlens_q[row + 1] - m.cu_seqlens_q[row]; }
    // Start of an entry's vector in a plane of keys or values.
    int64_t at(int64_t row, int64_t group, int64_t entry) const {
        const int64_t page = m.block_table[row * m.pages + entry / kPage];
        return ((page * groups + group) * kPage + entry % kPage) * size;
    }
};

struct Heads {             // online softmax of the query heads of a tile
    const Element** query; // [heads] where each query is
    float* largest;        // [heads] score so far
    float* weight;         // [heads, 16] sum of weights, in sixteen parts
    float* mixed;          // [heads, padded] weighted sum of values
};

struct Block {                  // up to sixteen entries
    Element* keys;              // [steps, 16]: an element of each entry; missing ones are zero
    uint32_t* pairs;            // [8, padded]: the numbers of two neighbouring entries (dots)
    const Act* values[kBlock];  // where each entry's are (float32)
    int64_t entries;
};

#ifdef EAGLE3_DOTS

// Entries at offsets `at` of the planes, in order; the places of missing ones are zero.
void pack(const Problem& p, const int64_t* at, int64_t entries, Block& block) {
    const int64_t pairs = p.steps(), padded = p.padded();
    block.entries = entries;
    for (int64_t k = 0; k < pairs; k += kLanes) {
        const __mmask16 live = pairs - k >= kLanes ? 0xFFFF : (1u << (pairs - k)) - 1;
        __m512i rows[16];
        for (int64_t i = 0; i < kBlock; ++i)
            rows[i] = i < entries ? _mm512_maskz_loadu_epi32(live, p.keys + at[i] + 2 * k)
                                  : _mm512_setzero_si512();
        transpose(rows);
        for (int64_t i = 0; i < kLanes; ++i)
            _mm512_storeu_si512(block.keys + (k + i) * kBlock, rows[i]);
    }
    // 0, 32, 1, 33, …: lane i takes number i of the first entry and of the second.
    const __m512i count = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i low = _mm512_or_si512(
        count, _mm512_slli_epi32(_mm512_add_epi32(count, _mm512_set1_epi32(32)), 16));
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t i = 0; i < kBlock; i += 2)
        for (int64_t c = 0; c < padded; c += 32) {
            const __mmask32 live = p.size - c >= 32 ? ~0u : (1u << (p.size - c)) - 1;
            const __m512i even = i < entries ? _mm512_maskz_loadu_epi16(live, p.values + at[i] + c)
                                             : _mm512_setzero_si512();
            const __m512i odd = i + 1 < entries
                                    ? _mm512_maskz_loadu_epi16(live, p.values + at[i + 1] + c)
                                    : _mm512_setzero_si512();
            uint32_t* to = block.pairs + i / 2 * padded + c;
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(even, low, odd));
            _mm512_storeu_si512(to + kLanes, _mm512_permutex2var_epi16(even, high, odd));
        }
}

using Weights = bf16[kBlock];

// acc + the products of two pairs, lane by lane.
inline F16 multiply_add(const Element* left, Element right, F16 acc) {
    return {_mm512_dpbf16_ps(acc.v, (__m512bh)_mm512_loadu_si512(left),
                             (__m512bh)_mm512_set1_epi32(right))};
}

// Weighted values of columns [c, c + 32) onto low and high.
template <int Count>
inline void mix(const Problem& p, const Block& block, const Weights* weights, int64_t c,
                F16 (&low)[Count], F16 (&high)[Count]) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < kBlock / 2; ++i) {
        const uint32_t* from = block.pairs + i * p.padded() + c;
#pragma GCC unroll 4
        for (int r = 0; r < Count; ++r) {
            Element both;
            std::memcpy(&both, weights[r] + 2 * i, sizeof both);
            low[r] = multiply_add(from, both, low[r]);
            high[r] = multiply_add(from + kLanes, both, high[r]);
        }
    }
}

#else

void pack(const Problem& p, const int64_t* at, int64_t entries, Block& block) {
    block.entries = entries;
    for (int64_t i = 0; i < entries; ++i) block.values[i] = p.values + at[i];
    for (int64_t k = 0; k < p.size; k += kLanes) {
        F16 rows[kBlock];
        for (int64_t i = 0; i < kBlock; ++i)
            rows[i] = i < entries ? load(p.keys + at[i] + k, p.size - k) : zero();
        store_transposed(block.keys + k * kBlock, rows);
    }
}

using Weights = float[kBlock];

inline F16 multiply_add(const Element* left, Element right, F16 acc) {
    return fma(load(left), all(right), acc);
}

template <int Count>
inline void mix(const Problem& p, const Block& block, const Weights* weights, int64_t c,
                F16 (&low)[Count], F16 (&high)[Count]) {
    for (int64_t i = 0; i < block.entries; ++i) {
        const F16 left = load(block.values[i] + c, p.size - c);
        const F16 right =
            p.size > c + kLanes ? load(block.values[i] + c + kLanes, p.size - c - kLanes) : zero();
#pragma GCC unroll 4
        for (int r = 0; r < Count; ++r) {
            const F16 both = all(weights[r][i]);
            low[r] = fma(left, both, low[r]);
            high[r] = fma(right, both, high[r]);
        }
    }
}

#endif

// Ask for the sixteen entries from `next` on while the ones before them are folded.
void prefetch(const Problem& p, int64_t next) {
    for (int64_t i = 0; i < kBlock * p.size; i += 64 / sizeof(Act)) {
        _mm_prefetch(p.keys + next + i, _MM_HINT_T1);
        _mm_prefetch(p.values + next + i, _MM_HINT_T1);
    }
}

// Fold a block into the softmax of `Count` heads from `first` on.
template <int Count>
void fold(const Problem& p, const Block& block, const Heads& heads, int64_t first) {
    const int64_t steps = p.steps(), padded = p.padded();
    const Element** query = heads.query + first;
    const F16 scale = all(kLog2e / std::sqrt(static_cast<float>(p.size)));
    float hidden[kBlock];  // what is added to scores: missing entries weigh nothing
    for (int64_t i = 0; i < kBlock; ++i)
        hidden[i] = i < block.entries ? 0 : -std::numeric_limits<float>::infinity();

    F16 even[Count], odd[Count];  // scores, a lane an entry; two chains hide the latency
    for (int r = 0; r < Count; ++r) even[r] = odd[r] = zero();
    const auto score = [&](F16(&acc)[Count], int64_t k) {
#pragma GCC unroll 4
        for (int r = 0; r < Count; ++r)
            acc[r] = multiply_add(block.keys + k * kBlock, query[r][k], acc[r]);
    };
    for (int64_t k = 0; k + 1 < steps; k += 2) score(even, k), score(odd, k + 1);
    if (steps % 2) score(even, steps - 1);

    F16 shrink[Count];
    alignas(32) Weights weights[Count];
#pragma GCC unroll 4
    for (int r = 0; r < Count; ++r) {
        const F16 scores = (even[r] + odd[r]) * scale + load(hidden);
        const float before = heads.largest[first + r], after = std::max(before, largest(scores));
        heads.largest[first + r] = after;
        shrink[r] = exp2(all(before - after));
        // In bf16 weights are rounded before they are summed, so that those that mix the values add
        // up to one.
        store(weights[r], exp2(scores - all(after)));
        float* weight = &heads.weight[(first + r) * kLanes];
        store(weight, fma(load(weight), shrink[r], load(weights[r])));
    }

    for (int64_t c = 0; c < padded; c += 32) {
        F16 low[Count], high[Count];
        float* mixed = &heads.mixed[first * padded + c];
#pragma GCC unroll 4
        for (int r = 0; r < Count; ++r) {
            low[r] = load(mixed + r * padded) * shrink[r];
            high[r] = load(mixed + r * padded + kLanes) * shrink[r];
        }
        mix<Count>(p, block, weights, c, low, high);
#pragma GCC unroll 4
        for (int r = 0; r < Count; ++r) {
            store(mixed + r * padded, low[r]);
            store(mixed + r * padded + kLanes, high[r]);
        }
    }
}

void fold(const Problem& p, const Block& block, const Heads& heads, int64_t first, int64_t last) {
    for (; first + kHeads <= last; first += kHeads) fold<kHeads>(p, block, heads, first);
    if (last - first == 3) fold<3>(p, block, heads, first);
    if (last - first == 2) fold<2>(p, block, heads, first);
    if (last - first == 1) fold<1>(p, block, heads, first);
}

// The entries from `from` on that one query sees, ascending; returns how many.
int64_t seen_from(const Problem& p, int64_t row, int64_t query, int64_t from, int64_t* seen) {
    const int64_t seq_len = p.m.seq_lens[row];
    int64_t count = 0;
    const int64_t end = p.m.mask ? seq_len : seq_len + query + 1;
    for (int64_t entry = from; entry < end; ++entry) seen[count++] = entry;
    if (p.m.mask)
        for (uint64_t bits = p.m.mask[p.m.cu_seqlens_q[row] + query]; bits; bits &= bits - 1)
            if (const int64_t entry = seq_len + __builtin_ctzll(bits); entry >= from)
                seen[count++] = entry;
    return count;
}

// Queries [from, to) of one row and one group of heads.
void attend(const Problem& p, int64_t row, int64_t group, int64_t from, int64_t to) {
    const int64_t sharing = p.shared_heads(), padded = p.padded(), total = (to - from) * sharing;
    // Of the thread, so that memory is asked for once; by pointer, so that inner loops do not look
    // for it.
    static thread_local std::vector<const Element*> queries;
    static thread_local std::vector<float> numbers, widened;
    static thread_local std::vector<Element> keys;
    static thread_local std::vector<uint32_t> pairs;
    queries.resize(total);
    numbers.assign(total * (1 + kLanes + padded), 0.0f);
    keys.resize((p.steps() + kLanes - 1) / kLanes * kLanes * kBlock);
    pairs.resize(kDots ? kBlock / 2 * padded : 0);
    const Heads heads{queries.data(), numbers.data(), numbers.data() + total,
                      numbers.data() + total * (1 + kLanes)};
    Block block{keys.data(), pairs.data(), {}, 0};
    // Finite, so that the first rescaling is by 2^-huge = 0 and not NaN.
    std::fill_n(heads.largest, total, -1e30f);
    const auto origin = [&](int64_t i) {  // of head i of the tile, in query and mixed
        const int64_t token = p.m.cu_seqlens_q[row] + from + i / sharing;
        return (token * p.heads + group * sharing + i % sharing) * p.size;
    };
    constexpr bool kWiden = sizeof(Act) == 2 && !kDots;
    if (kWiden) widened.resize(total * padded);
    for (int64_t i = 0; i < total; ++i) {
        heads.query[i] = reinterpret_cast<const Element*>(p.query + origin(i));
        if constexpr (kWiden) {
            float* wide = widened.data() + i * padded;
            for (int64_t c = 0; c < p.size; c += kLanes)
                store(wide + c, load(p.query + origin(i) + c, p.size - c), p.size - c);
            heads.query[i] = reinterpret_cast<const Element*>(wide);
        }
    }

    int64_t at[kBlock];
    // Entries [begin, end) that one query sees, or those of `listed`, block by block.
    const auto gather = [&](int64_t query, int64_t begin, int64_t end, const int64_t* listed) {
        const int64_t head = (query - from) * sharing;
        for (int64_t entry = begin, next; entry < end; entry = next) {
            next = std::min((entry / kBlock + 1) * kBlock, end);
            for (int64_t e = entry; e < next; ++e)
                at[e - entry] = p.at(row, group, listed ? listed[e - begin] : e);
            pack(p, at, next - entry, block);
            fold(p, block, heads, head, head + sharing);
        }
    };
    // A window hides each query's first entries; blocks of the tile begin where all see them whole.
    const auto first_seen = [&](int64_t query) {
        return p.m.first_seen ? p.m.first_seen[p.m.cu_seqlens_q[row] + query] : 0;
    };
    int64_t highest = 0;
    for (int64_t query = from; query < to; ++query) highest = std::max(highest, first_seen(query));
    const int64_t common = (p.m.seq_lens[row] + (p.m.mask ? 0 : from + 1)) / kBlock * kBlock;
    const int64_t shared = std::min(common, (highest + kBlock - 1) / kBlock * kBlock);
    if (highest)
        for (int64_t query = from; query < to; ++query)
            gather(query, first_seen(query), shared, nullptr);
    for (int64_t entry = shared; entry < common; entry += kBlock) {
        for (int64_t i = 0; i < kBlock; ++i) at[i] = p.at(row, group, entry) + i * p.size;
        pack(p, at, kBlock, block);
        if (entry + kBlock < common) prefetch(p, p.at(row, group, entry + kBlock));
        fold(p, block, heads, 0, total);
    }

    int64_t seen[kBlock + kWindow];
    for (int64_t query = from; query < to; ++query) {
        const int64_t begin = std::max(common, first_seen(query));
        gather(query, begin, begin + seen_from(p, row, query, begin, seen), seen);
    }

    for (int64_t i = 0; i < total; ++i) {
        const float weight = sum(load(&heads.weight[i * kLanes]));
        const F16 scale = all(weight == 0 ? 0 : 1 / weight);  // a query that sees nothing: zeros
        Act* to_head = p.mixed + origin(i);
        for (int64_t c = 0; c < p.size; c += kLanes)
            store(to_head + c, load(&heads.mixed[i * padded + c]) * scale, p.size - c);
    }
}

}  // namespace

// query [tokens, heads, size] → mixed, as it; see tree_attention of base.py.
extern "C" void eagle3_tree_attention(const Act* query, const Act* keys, const Act* values,
                                      const Metadata* metadata, Act* mixed, int64_t heads,
                                      int64_t groups, int64_t size, int64_t threads) {
    const Problem p{query, keys, values, *metadata, mixed, heads, groups, size};
    const int64_t rows = metadata->rows;
    // Large tiles pack less, small ones share the work out better.
    const auto tiles_of = [&](int64_t row, int64_t tile) { return (p.count(row) + tile - 1) / tile; };
    int64_t tile = 2 * kTile, tiles = 0, work = 0;
    do {
        tile /= 2, tiles = 0;
        for (int64_t row = 0; row < rows; ++row) tiles += tiles_of(row, tile);
    } while (tile > 4 && groups * tiles < 3 * threads);
    static thread_local std::vector<int64_t> buffer;  // row and first query of each tile
    buffer.resize(2 * tiles);
    int64_t* const task = buffer.data();
    for (int64_t row = 0, next = 0; row < rows; ++row) {
        const int64_t hidden = metadata->first_seen && p.count(row)
                                   ? metadata->first_seen[metadata->cu_seqlens_q[row]]
                                   : 0;
        work += (metadata->seq_lens[row] - hidden + p.count(row)) * p.count(row) * heads * size;
        for (int64_t from = 0; from < p.count(row); from += tile, next += 2)
            task[next] = row, task[next + 1] = from;
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (work > kSerialWork)
    for (int64_t i = 0; i < tiles * groups; ++i) {
        const int64_t row = task[i / groups * 2], from = task[i / groups * 2 + 1];
        attend(p, row, i % groups, from, std::min(from + tile, p.count(row)));
    }
}
