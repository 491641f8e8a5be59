// Matrix products with packed weights.
//
// A weight [out, in] is stored as panels of 32 outputs. In bf16 a panel holds, for every pair of
// inputs, the pair of each output: what a dot-product instruction multiplies with a pair of x, what
// an AMX tile takes as it is, and what a shift and a mask turn into two vectors of float32.
//
//     panel 0   pair 0   w[0][0] w[0][1]  w[1][0] w[1][1]  …  w[31][0] w[31][1]      128 bytes
//               pair 1   w[0][2] w[0][3]  w[1][2] w[1][3]  …  w[31][2] w[31][3]
//               …
//     panel 1   pair 0   w[32][0] w[32][1] …
//
// In float32 a panel holds the 32 weights of input 0, then those of input 1, and so on.
//
// An output is one lane of one accumulator that walks the inputs in order, however many rows x has
// and however they are split: a row's result never depends on the rows beside it. In float32 it is
// the same chain of fused multiply-adds on every level.
//
// With few rows the product costs what reading the weights costs, so each thread reads one
// contiguous run of panels and asks for the next panel while it works on this one. With many rows,
// a chunk of them stays in the cache while all panels pass by; where products are in float32, a
// panel of bf16 is widened for the chunk once, not for every pass.
#include "amx.h"
#include "kernels.h"

#include <numeric>
#include <type_traits>
#include <vector>

namespace {

constexpr int64_t kPanel = 32;
constexpr int64_t kStep = 128;  // bytes of a panel at one step: a pair of inputs, or one input
constexpr int64_t kLine = 64, kSets = 64, kWays = 8;  // of the L1 cache
constexpr int64_t kChunkBytes = 384 * 1024;  // rows of x that stay in the L2 cache beside a panel
constexpr int64_t kSerialWork = 1 << 15;     // multiplications for which one thread is enough
constexpr int64_t kStreams = 4;              // of prefetching
constexpr int64_t kWidened = 4;              // passes for which a panel of bf16 is widened first
#ifdef __AVX512F__
constexpr int kRows = kTiles ? 32 : 12;  // rows that a pass keeps in registers,
constexpr int kWideRows = 12;            // and both halves of a panel with them
#else
constexpr int kRows = 6, kWideRows = 2;
#endif

struct Product {
    const Element* x;    // [rows][stride], as it is multiplied
    const char* weight;  // packed, from `first_panel` on
    const Act* bias;     // [out] or null
    Act* y;              // [rows, out]
    int64_t rows, out, steps, stride, first_panel = 0;
    int64_t panels() const { return (out + kPanel - 1) / kPanel; }
    int64_t passes() const { return (rows + kRows - 1) / kRows; }
    // Passes are of nearly equal height, those of tiles are full.
    int64_t first_row(int64_t pass) const {
        return kTiles ? std::min(pass * kRows, rows) : rows * pass / passes();
    }
};

#ifdef EAGLE3_DOTS

template <int Rows, int Halves>
inline void multiply_step(F16 (&acc)[Halves][Rows], const char* weight, const uint32_t* x,
                          int64_t stride, int64_t k, bool) {
#pragma GCC unroll 2
    for (int h = 0; h < Halves; ++h) {
        const __m512i words = _mm512_loadu_si512(weight + h * 64);
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r)
            acc[h][r].v = _mm512_dpbf16_ps(acc[h][r].v, (__m512bh)words,
                                           (__m512bh)_mm512_set1_epi32(x[r * stride + k]));
    }
}

#else

template <int Rows, int Halves>
inline void accumulate(F16 (&acc)[Halves][Rows], const F16 (&w)[Halves], const float* x,
                       int64_t stride) {
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
        const F16 both = all(x[r * stride]);
#pragma GCC unroll 2
        for (int h = 0; h < Halves; ++h) acc[h][r] = fma(w[h], both, acc[h][r]);
    }
}

template <int Rows, int Halves>
inline void multiply_step(F16 (&acc)[Halves][Rows], const char* weight, const float* x,
                          int64_t stride, int64_t k, bool wide) {
    F16 w[Halves];
    if (wide) {
#pragma GCC unroll 2
        for (int h = 0; h < Halves; ++h) w[h] = load(reinterpret_cast<const float*>(weight + h * 64));
        accumulate(acc, w, x + k, stride);
        return;
    }
#pragma GCC unroll 2
    for (int h = 0; h < Halves; ++h)
        w[h] = first(load_pairs(reinterpret_cast<const uint32_t*>(weight + h * 64)));
    accumulate(acc, w, x + 2 * k, stride);
    asm volatile("" : "+r"(weight));  // read the words again: six rows leave no register for them
#pragma GCC unroll 2
    for (int h = 0; h < Halves; ++h)
        w[h] = second(load_pairs(reinterpret_cast<const uint32_t*>(weight + h * 64)));
    accumulate(acc, w, x + 2 * k + 1, stride);
}

#endif

// `Rows` rows from `row` on times `Halves` halves of a panel; each step also prefetches `Lines`
// cache lines at `ahead`.
template <int Rows, int Halves, bool Wide>
void multiply(const Product& p, int64_t row, int64_t panel, int64_t half, const char* ahead,
              int lines) {
    const char* weight = p.weight + ((panel - p.first_panel) * p.steps * 2 + half) * 64;
    const Element* x = p.x + row * p.stride;
    F16 acc[Halves][Rows];
#pragma GCC unroll 2
    for (int h = 0; h < Halves; ++h)
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r) acc[h][r] = zero();
    if (lines == 0) {
#pragma GCC unroll 1
        for (int64_t k = 0; k < p.steps; ++k)
            multiply_step<Rows, Halves>(acc, weight + k * kStep, x, p.stride, k, Wide);
    } else {
#pragma GCC unroll 1
        for (int64_t k = 0; k < p.steps; ++k) {
            prefetch_line<kStreams>(ahead, p.steps * lines, k * lines);
            if (lines == 2) prefetch_line<kStreams>(ahead, p.steps * 2, k * 2 + 1);
            multiply_step<Rows, Halves>(acc, weight + k * kStep, x, p.stride, k, Wide);
        }
    }
#pragma GCC unroll 2
    for (int h = 0; h < Halves; ++h) {
        const int64_t at = panel * kPanel + (half + h) * kLanes, live = p.out - at;
        if (live <= 0) break;
        const F16 bias = p.bias ? load(p.bias + at, live) : zero();
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r) store(p.y + (row + r) * p.out + at, acc[h][r] + bias, live);
    }
}

using Pass = void (*)(const Product&, int64_t, int64_t, int64_t, const char*, int);
template <int Halves, bool Wide>
constexpr Pass kPasses[13] = {
    nullptr,
    multiply<1, Halves, Wide>, multiply<2, Halves, Wide>, multiply<3, Halves, Wide>,
    multiply<4, Halves, Wide>, multiply<5, Halves, Wide>, multiply<6, Halves, Wide>,
#ifdef __AVX512F__
    multiply<7, Halves, Wide>, multiply<8, Halves, Wide>, multiply<9, Halves, Wide>,
    multiply<10, Halves, Wide>, multiply<11, Halves, Wide>, multiply<12, Halves, Wide>,
#endif
};

// Passes [begin, end) times one panel, or times one of its halves after the other where registers
// do not hold both. The first two share the prefetching of a panel at `ahead`, if it is not null.
void multiply_passes(const Product& p, bool wide, int64_t begin, int64_t end, int64_t panel,
                     const char* ahead) {
    const bool both = (p.rows + p.passes() - 1) / p.passes() <= kWideRows;
    const Pass* passes = both ? wide ? kPasses<2, true> : kPasses<2, false>
                              : wide ? kPasses<1, true> : kPasses<1, false>;
    const int64_t distance = p.steps * 64;
    for (int64_t half = 0; half < (both ? 1 : 2); ++half)
        for (int64_t pass = begin; pass < end; ++pass) {
            const int64_t row = p.first_row(pass), height = p.first_row(pass + 1) - row;
            const Pass run = passes[height];
            if (!ahead || half || pass - begin > 1)
                run(p, row, panel, half, nullptr, 0);
            else if (end - begin == 1) run(p, row, panel, half, ahead, 2);
            else run(p, row, panel, half, ahead + (pass - begin) * distance, 1);
        }
}

// The same times a panel of bf16 that is widened first: the numbers of a pair become two steps.
void multiply_widened(Product p, int64_t begin, int64_t end, int64_t panel) {
    static thread_local std::vector<float> widened;
    const auto* words = reinterpret_cast<const uint32_t*>(p.weight) + panel * p.steps * kPanel;
    widened.resize(2 * p.steps * kPanel);
    for (int64_t k = 0; k < p.steps; ++k)
        for (int64_t lane = 0; lane < kPanel; lane += kLanes) {
            const Pairs pairs = load_pairs(words + k * kPanel + lane);
            store(&widened[2 * k * kPanel + lane], first(pairs));
            store(&widened[(2 * k + 1) * kPanel + lane], second(pairs));
        }
    p.weight = reinterpret_cast<const char*>(widened.data());
    p.first_panel = panel, p.steps *= 2;
    multiply_passes(p, true, begin, end, panel, nullptr);
}

// The panel that a thread begins with, where all rows are one chunk.
const char* first_panel(const Matrix& matrix, int64_t thread, int64_t team) {
    const int64_t panels = (matrix.out + kPanel - 1) / kPanel;
    const int64_t steps = matrix.wide ? matrix.in : packed_pairs(matrix.in);
    return matrix.data + panels * thread / team * steps * kStep;
}

// Whether the L1 cache holds a line of each of so many rows, `bytes` apart.
bool rows_fit(int64_t rows, int64_t bytes) {
    const int64_t sets = bytes % kLine ? 1 : kSets / std::gcd(bytes / kLine, kSets);
    return rows <= kWays * sets;
}

// Rows of x as they are multiplied, side by side at a distance that no cache set repeats: rows a
// power of two apart, as in many models, would compete for a few lines of the L1 cache.
const Element* prepared(const Act* x, int64_t rows, int64_t in, int64_t width, int64_t& stride,
                        int64_t threads) {
    static thread_local std::vector<Element> buffer;
    stride = ((width + 15) / 16 | 1) * 16;
    buffer.resize(rows * stride);
    Element* const to = buffer.data();
    const int64_t step = stride;
#pragma omp parallel for num_threads(threads) if (rows * in > kSerialWork)
    for (int64_t row = 0; row < rows; ++row) {
        if constexpr (kDots) {
            std::memset(to + row * step, 0, width * sizeof(Element));  // an odd input has a zero
            std::memcpy(to + row * step, x + row * in, in * sizeof(Act));
        } else {
            float* wide = reinterpret_cast<float*>(to + row * step);
            for (int64_t i = 0; i < in; i += kLanes)
                store(wide + i, load(x + row * in + i, in - i), in - i);
            for (int64_t i = in; i < width; ++i) wide[i] = 0;
        }
    }
    return to;
}

}  // namespace

extern "C" {

// Bytes that `eagle3_pack` fills.
int64_t eagle3_packed_size(int64_t out, int64_t in, int64_t wide) {
    const int64_t steps = wide ? in : packed_pairs(in);
    return (out + kPanel - 1) / kPanel * steps * kStep;
}

// weight [out, in], bf16 or with `wide` float32 → packed, 64-byte aligned; outputs and inputs that
// fill up a panel or a pair are zero.
void eagle3_pack(const void* weight, void* packed, int64_t out, int64_t in, int64_t wide,
                 int64_t threads) {
    const int64_t steps = wide ? in : packed_pairs(in), panels = (out + kPanel - 1) / kPanel;
    const auto* numbers = static_cast<const uint32_t*>(weight);
    const auto* halves = static_cast<const bf16*>(weight);
    auto* to = static_cast<uint32_t*>(packed);
    const auto half = [&](int64_t row, int64_t k) -> uint32_t {
        return row < out && k < in ? halves[row * in + k] : 0;
    };
#pragma omp parallel for num_threads(threads)
    for (int64_t panel = 0; panel < panels; ++panel)
        for (int64_t k = 0; k < steps; ++k)
            for (int64_t lane = 0; lane < kPanel; ++lane) {
                const int64_t row = panel * kPanel + lane;
                to[(panel * steps + k) * kPanel + lane] =
                    wide ? (row < out ? numbers[row * in + k] : 0)
                         : half(row, 2 * k) | half(row, 2 * k + 1) << 16;
            }
}

// y [rows, out] = x [rows, in] · weightᵀ + bias; bias may be null. While a thread multiplies its last
// panel it asks for the first one that it will need of `next`, which may be null, too.
void eagle3_linear(const Act* x, const Matrix* matrix, const Act* bias, Act* y, int64_t rows,
                   int64_t threads, const Matrix* next) {
    const int64_t in = matrix->in, out = matrix->out;
    const bool wide = matrix->wide, fit = rows_fit(rows, in * sizeof(Act));
    Product p{nullptr, matrix->data, bias, y, rows, out, wide ? in : packed_pairs(in), in};
    // What is read of each row: whole steps.
    const int64_t width = wide ? in : kDots ? p.steps : 2 * p.steps;
    if (kDots && fit && in == 2 * p.steps) {
        p.x = reinterpret_cast<const Element*>(x), p.stride = p.steps;
    } else if (std::is_same_v<Act, Element> && fit && in == width) {
        p.x = reinterpret_cast<const Element*>(x);
    } else {
        p.x = prepared(x, rows, in, width, p.stride, threads);
    }
    const int64_t pass_bytes = 4 * std::max<int64_t>(width, 1) * kRows;
    const int64_t chunk = std::max<int64_t>(1, kChunkBytes / pass_bytes);  // passes
    const int64_t passes = p.passes(), chunks = (passes + chunk - 1) / chunk;
    const int64_t tasks = chunks * p.panels();
#pragma omp parallel num_threads(threads) if (rows * in * out > kSerialWork)
    {
        // A contiguous share each: all panels of one chunk of rows come before the next chunk.
        const int64_t thread = omp_get_thread_num(), team = omp_get_num_threads();
        const int64_t last = tasks * (thread + 1) / team;
        const Tiles tiles(rows);
        for (int64_t task = tasks * thread / team; task < last; ++task) {
            const int64_t begin = task / p.panels() * chunk, panel = task % p.panels();
            const int64_t end = std::min(begin + chunk, passes);
            const char* ahead = p.weight + (panel + 1) * p.steps * kStep;
            if (panel + 1 == p.panels() || task + 1 == last)
                ahead = next && task + 1 == last ? first_panel(*next, thread, team) : nullptr;
            if constexpr (kTiles)
                multiply_tiles(reinterpret_cast<const uint32_t*>(p.x), p.stride,
                               p.weight + panel * p.steps * kStep, p.steps, bias, y,
                               p.first_row(begin), p.first_row(end), rows, panel * kPanel, out,
                               ahead);
            else if (!kDots && !wide && end - begin >= kWidened)
                multiply_widened(p, begin, end, panel);
            else
                multiply_passes(p, wide, begin, end, panel, ahead);
        }
    }
}

}  // extern "C"
