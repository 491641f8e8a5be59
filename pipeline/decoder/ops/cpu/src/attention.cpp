// Attention over a paged cache: online softmax (Milakov & Gimelshein 2018, arXiv:1805.02867) over
// blocks of the sixteen next entries that a query sees.
//
// Blocks count seen entries, not offsets, so a query's result depends on the sequence of entries it
// sees and on nothing else. A node of a tree gets the bits of plain decoding of the same branch:
//
//     decoding     … e14 e15 | e16 e17 e18                  e17, e18: two drafted tokens, accepted
//     in a tree    … e14 e15 | e16  ·  e18  ·   ·  e21      the same two behind rejected siblings
//                      block | block: three entries, whatever lies between them
//
// Whole blocks that every query of a tile sees are packed once for all of them; the rest, up to two
// blocks when decoding, each query gathers for itself. Unseen entries are never loaded.
#include "simd.h"

#include <cstring>
#include <vector>

namespace {

constexpr int64_t kPage = 64;    // PAGE of base.py
constexpr int64_t kBlock = 16;   // entries scored at once, one a lane; divides a page
constexpr int64_t kWindow = 64;  // bits of a mask
constexpr int64_t kTile = 16;    // most queries that share packed blocks
constexpr int64_t kSerialWork = 1 << 15;

struct Problem {
    const bf16* query;                             // [rows, count, heads, size]
    const bf16 *keys, *values;                     // [pages, groups, kPage, size]
    const int64_t *block_table, *seq_lens, *mask;  // [rows, pages], [rows], [rows, count] or null
    bf16* mixed;                                   // as query
    int64_t rows, count, heads, groups, size, pages;
    int64_t shared_heads() const { return heads / groups; }
    int64_t padded() const { return (size + 31) / 32 * 32; }
    // Start of an entry's vector in a plane of keys or values.
    int64_t at(int64_t row, int64_t group, int64_t entry) const {
        const int64_t page = block_table[row * pages + entry / kPage];
        return ((page * groups + group) * kPage + entry % kPage) * size;
    }
};

struct Heads {           // online softmax of the query heads of a tile
    const bf16** query;  // [heads] where each query seq_lens
    float* largest;      // [heads] scores so far
    float* weight;       // [heads, 16] their sum, in sixteen parts
    float* mixed;        // [heads, padded] weighted sum of values
};

struct Block {         // up to sixteen entries, packed for dot products of pairs
    uint32_t* keys;    // [size / 2, 16]: a pair of numbers of each entry
    uint32_t* values;  // [8, padded]: the numbers of two neighbouring entries
    int64_t entries;
};

// Entries at offsets `at` of the planes, in order; the places of missing ones are zero.
void pack(const Problem& p, const int64_t* at, int64_t entries, Block& block) {
    const int64_t pairs = p.size / 2, padded = p.padded();
    uint32_t *keys = block.keys, *values = block.values;
    block.entries = entries;
    for (int64_t k = 0; k < pairs; k += kLanes) {
        const __mmask16 live = lanes(k, pairs);
        __m512i rows[16];
        for (int64_t i = 0; i < kBlock; ++i)
            rows[i] = i < entries ? _mm512_maskz_loadu_epi32(live, p.keys + at[i] + 2 * k)
                                  : _mm512_setzero_si512();
        transpose(rows);
        for (int64_t i = 0; i < kLanes; ++i) _mm512_storeu_si512(keys + (k + i) * kBlock, rows[i]);
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
            uint32_t* to = values + i / 2 * padded + c;
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(even, low, odd));
            _mm512_storeu_si512(to + kLanes, _mm512_permutex2var_epi16(even, high, odd));
        }
}

// Ask for the sixteen entries from `next` on while the ones before them are folded.
void prefetch(const Problem& p, int64_t next) {
    for (int64_t i = 0; i < kBlock * p.size; i += 32) {
        _mm_prefetch(p.keys + next + i, _MM_HINT_T1);
        _mm_prefetch(p.values + next + i, _MM_HINT_T1);
    }
}

// Fold a block into the softmax of `Count` heads from `first` on.
template <int Count>
void fold(const Problem& p, const Block& block, const Heads& heads, int64_t first) {
    const int64_t pairs = p.size / 2, padded = p.padded();
    const __mmask16 live = lanes(0, block.entries);
    const uint32_t *keys = block.keys, *values = block.values;
    const bf16** query = heads.query + first;
    const __m512 scale = _mm512_set1_ps(kLog2e / std::sqrt(static_cast<float>(p.size)));

    __m512 even[Count], odd[Count];  // scores, a lane an entry; two chains hide the latency
    for (int r = 0; r < Count; ++r) even[r] = odd[r] = _mm512_setzero_ps();
    const auto score = [&](__m512(&acc)[Count], int64_t k) {
        const __m512i key = _mm512_loadu_si512(keys + k * kBlock);
#pragma GCC unroll 4
        for (int r = 0; r < Count; ++r) acc[r] = dot(acc[r], key, broadcast_pair(query[r] + 2 * k));
    };
    for (int64_t k = 0; k + 1 < pairs; k += 2) score(even, k), score(odd, k + 1);
    if (pairs % 2) score(even, pairs - 1);

    __m512 shrink[Count];
    alignas(32) bf16 weights[Count][kBlock];
#pragma GCC unroll 4
    for (int r = 0; r < Count; ++r) {
        const __m512 scores = _mm512_mul_ps(_mm512_add_ps(even[r], odd[r]), scale);
        const float before = heads.largest[first + r];
        const float after = std::max(before, _mm512_mask_reduce_max_ps(live, scores));
        heads.largest[first + r] = after;
        shrink[r] = exp2(_mm512_set1_ps(before - after));
        // Weights are rounded before they are summed, so that those that mix the values add up to
        // one.
        const __m256i rounded =
            narrow(_mm512_maskz_mov_ps(live, exp2(_mm512_sub_ps(scores, _mm512_set1_ps(after)))));
        _mm256_store_si256(reinterpret_cast<__m256i*>(weights[r]), rounded);
        float* weight = &heads.weight[(first + r) * kLanes];
        _mm512_storeu_ps(weight,
                         _mm512_fmadd_ps(_mm512_loadu_ps(weight), shrink[r], widen(rounded)));
    }

    for (int64_t c = 0; c < padded; c += 32) {
        __m512 low[Count], high[Count];
        float* mixed = &heads.mixed[first * padded + c];
#pragma GCC unroll 4
        for (int r = 0; r < Count; ++r) {
            low[r] = _mm512_mul_ps(_mm512_loadu_ps(mixed + r * padded), shrink[r]);
            high[r] = _mm512_mul_ps(_mm512_loadu_ps(mixed + r * padded + kLanes), shrink[r]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < kBlock / 2; ++i) {
            const __m512i left = _mm512_loadu_si512(values + i * padded + c),
                          right = _mm512_loadu_si512(values + i * padded + c + kLanes);
#pragma GCC unroll 4
            for (int r = 0; r < Count; ++r) {
                const __m512i both = broadcast_pair(weights[r] + 2 * i);
                low[r] = dot(low[r], left, both);
                high[r] = dot(high[r], right, both);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < Count; ++r) {
            _mm512_storeu_ps(mixed + r * padded, low[r]);
            _mm512_storeu_ps(mixed + r * padded + kLanes, high[r]);
        }
    }
}

void fold(const Problem& p, const Block& block, const Heads& heads, int64_t first, int64_t last) {
    for (; first + 4 <= last; first += 4) fold<4>(p, block, heads, first);
    if (last - first == 3) fold<3>(p, block, heads, first);
    if (last - first == 2) fold<2>(p, block, heads, first);
    if (last - first == 1) fold<1>(p, block, heads, first);
}

// The entries from `from` on that one query sees, ascending; returns how many.
int64_t seen_from(const Problem& p, int64_t row, int64_t query, int64_t from, int64_t* seen) {
    const int64_t seq_len = p.seq_lens[row];
    int64_t count = 0;
    const int64_t end = p.mask ? seq_len : seq_len + query + 1;
    for (int64_t entry = from; entry < end; ++entry) seen[count++] = entry;
    if (p.mask)
        for (uint64_t bits = p.mask[row * p.count + query]; bits; bits &= bits - 1)
            seen[count++] = seq_len + __builtin_ctzll(bits);
    return count;
}

// Queries [from, to) of one row and one group of heads.
void attend(const Problem& p, int64_t row, int64_t group, int64_t from, int64_t to) {
    const int64_t sharing = p.shared_heads(), padded = p.padded(), total = (to - from) * sharing;
    // Of the thread, so that memory is asked for once; by pointer, so that inner loops do not look
    // for it.
    static thread_local std::vector<const bf16*> queries;
    static thread_local std::vector<float> numbers;
    static thread_local std::vector<uint32_t> packed;
    queries.resize(total);
    numbers.assign(total * (1 + kLanes + padded), 0.0f);
    packed.resize((p.size / 2 + kLanes - 1) / kLanes * kLanes * kBlock + kBlock / 2 * padded);
    const Heads heads{queries.data(), numbers.data(), numbers.data() + total,
                      numbers.data() + total * (1 + kLanes)};
    Block block{packed.data() + kBlock / 2 * padded, packed.data(), 0};
    // Finite, so that the first rescaling is by 2^-huge = 0 and not NaN.
    std::fill_n(heads.largest, total, -1e30f);
    const int64_t origin = ((row * p.count + from) * p.heads + group * sharing) * p.size;
    for (int64_t i = 0; i < total; ++i)
        heads.query[i] = p.query + origin + (i / sharing * p.heads + i % sharing) * p.size;

    int64_t at[kBlock];
    const int64_t common = (p.seq_lens[row] + (p.mask ? 0 : from + 1)) / kBlock * kBlock;
    for (int64_t entry = 0; entry < common; entry += kBlock) {
        for (int64_t i = 0; i < kBlock; ++i) at[i] = p.at(row, group, entry) + i * p.size;
        pack(p, at, kBlock, block);
        if (entry + kBlock < common) prefetch(p, p.at(row, group, entry + kBlock));
        fold(p, block, heads, 0, total);
    }

    int64_t seen[kBlock + kWindow];
    for (int64_t query = from; query < to; ++query) {
        const int64_t count = seen_from(p, row, query, common, seen),
                      first = (query - from) * sharing;
        for (int64_t done = 0; done < count; done += kBlock) {
            const int64_t entries = std::min(kBlock, count - done);
            for (int64_t i = 0; i < entries; ++i) at[i] = p.at(row, group, seen[done + i]);
            pack(p, at, entries, block);
            fold(p, block, heads, first, first + sharing);
        }
    }

    for (int64_t i = 0; i < total; ++i) {
        const float weight = _mm512_reduce_add_ps(_mm512_loadu_ps(&heads.weight[i * kLanes]));
        // A query that sees nothing gives zeros.
        const __m512 scale = _mm512_set1_ps(weight == 0 ? 0 : 1 / weight);
        bf16* to_head = p.mixed + (heads.query[i] - p.query);
        for (int64_t c = 0; c < p.size; c += kLanes)
            store(to_head + c, lanes(c, p.size),
                  _mm512_mul_ps(_mm512_loadu_ps(&heads.mixed[i * padded + c]), scale));
    }
}

}  // namespace

extern "C" void eagle3_tree_attention(const bf16* query, const bf16* keys, const bf16* values,
                                      const int64_t* block_table, const int64_t* seq_lens,
                                      const int64_t* mask, bf16* mixed, const int64_t* sizes,
                                      int64_t threads) {
    const Problem p{query, keys, values, block_table, seq_lens, mask, mixed,
                    sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]};
    // Large tiles pack less, small ones share the work out better.
    int64_t tile = kTile;
    while (tile > 4 && p.rows * p.groups * ((p.count + tile - 1) / tile) < 3 * threads) tile /= 2;
    const int64_t tiles = (p.count + tile - 1) / tile, tasks = p.rows * p.groups * tiles;
    int64_t work = 0;
    for (int64_t row = 0; row < p.rows; ++row)
        work += (seq_lens[row] + p.count) * p.count * p.heads * p.size;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (work > kSerialWork)
    for (int64_t task = 0; task < tasks; ++task) {
        const int64_t from = task % tiles * tile;
        attend(p, task / tiles / p.groups, task / tiles % p.groups, from,
               std::min(from + tile, p.count));
    }
}
