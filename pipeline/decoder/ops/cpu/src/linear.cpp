// Matrix products with packed bf16 weights.
//
// A weight [out, in] is stored as panels of 32 outputs; a panel holds, for every pair of inputs,
// the pair of each output, which is what one dot-product instruction multiplies with a pair of x:
//
//     panel 0   pair 0   w[0][0] w[0][1]  w[1][0] w[1][1]  …  w[31][0] w[31][1]      128 bytes
//               pair 1   w[0][2] w[0][3]  w[1][2] w[1][3]  …  w[31][2] w[31][3]
//               …
//     panel 1   pair 0   w[32][0] w[32][1] …
//
// An output is one lane of one accumulator that walks the pairs in order, however many rows x has
// and however they are split: a row's result never depends on the rows beside it.
//
// With few rows the product costs what reading the weights costs, so each thread reads one
// contiguous run of panels and asks for the next panel while it works on this one. With many rows,
// a chunk of them stays in the cache while all panels pass by.
#include "simd.h"

#include <vector>

namespace {

constexpr int64_t kPanel = 32;
constexpr int64_t kRows = 12;  // rows a pass keeps in registers: 24 accumulators
constexpr int64_t kWays = 8;   // ways of the L1 cache: rows that fit however far apart they lie
constexpr int64_t kChunkBytes = 384 * 1024;  // rows of x that stay in the L2 cache beside a panel
constexpr int64_t kSerialWork = 1 << 15;     // multiplications for which one thread is enough

struct Product {
    const uint32_t* x;       // pairs of inputs: [rows][pairs], or packed as [passes][pairs][height]
    const uint32_t* weight;  // packed
    const bf16* bias;        // [out] or null
    bf16* y;                 // [rows, out]
    int64_t rows, in, out;
    bool packed;  // with a vector of padding behind each pass
    int64_t pairs() const { return (in + 1) / 2; }
    int64_t panels() const { return (out + kPanel - 1) / kPanel; }
    int64_t passes() const { return (rows + kRows - 1) / kRows; }
    // Passes are of nearly equal height.
    int64_t first_row(int64_t pass) const { return rows * pass / passes(); }
};

// The rows of one pass side by side, in the order in which `multiply` reads them. Rows that lie a
// power of two apart, as in many models, would otherwise compete for a few lines of the L1 cache.
void pack_rows(const bf16* x, int64_t height, int64_t in, uint32_t* packed) {
    for (int64_t k = 0; 2 * k < in; k += kLanes) {
        // An odd last input is paired with zero.
        const __mmask32 live = in - 2 * k >= 32 ? ~0u : (1u << (in - 2 * k)) - 1;
        __m512i rows[16];
        for (int64_t r = 0; r < kLanes; ++r)
            rows[r] = r < height ? _mm512_maskz_loadu_epi16(live, x + r * in + 2 * k)
                                 : _mm512_setzero_si512();
        transpose(rows);
        // Whole vectors, each writing over the end of the one before: masked stores are slow on
        // some processors.
        for (int64_t i = 0; i < kLanes && 2 * (k + i) < in; ++i)
            _mm512_storeu_si512(packed + (k + i) * height, rows[i]);
    }
}

// The rows of pass number `pass` times one panel; each step also prefetches `Lines` cache lines at
// `ahead`.
template <int Rows, int Lines>
void multiply(const Product& p, int64_t pass, int64_t panel, const char* ahead) {
    const int64_t pairs = p.pairs(), first = p.first_row(pass);
    const uint32_t* weight = p.weight + panel * pairs * kPanel;
    const uint32_t* x = p.x + first * pairs + (p.packed ? pass * kLanes : 0);
    const int64_t row = p.packed ? 1 : pairs, step = p.packed ? Rows : 1;
    __m512 acc[2][Rows];
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) acc[0][r] = acc[1][r] = _mm512_setzero_ps();
#pragma GCC unroll 1
    for (int64_t k = 0; k < pairs; ++k) {
        const __m512i low = _mm512_load_si512(weight + k * kPanel),
                      high = _mm512_load_si512(weight + k * kPanel + kLanes);
        // Into L2: in L1 the next panel would push out this one before all passes have read it.
        for (int line = 0; line < Lines; ++line)
            _mm_prefetch(ahead + (k * Lines + line) * 64, _MM_HINT_T1);
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r) {
            const __m512i both = broadcast_pair(x + k * step + r * row);
            acc[0][r] = dot(acc[0][r], low, both);
            acc[1][r] = dot(acc[1][r], high, both);
        }
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
        const int64_t at = panel * kPanel + half * kLanes;
        if (at >= p.out) break;
        const __mmask16 live = lanes(at, p.out);
        const __m512 bias = p.bias ? load(p.bias + at, live) : _mm512_setzero_ps();
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r)
            store(p.y + (first + r) * p.out + at, live, _mm512_add_ps(acc[half][r], bias));
    }
}

using Kernel = void (*)(const Product&, int64_t, int64_t, const char*);
template <int Lines>
constexpr Kernel kKernels[kRows + 1] = {
    nullptr,
    multiply<1, Lines>, multiply<2, Lines>, multiply<3, Lines>, multiply<4, Lines>,
    multiply<5, Lines>, multiply<6, Lines>, multiply<7, Lines>, multiply<8, Lines>,
    multiply<9, Lines>, multiply<10, Lines>, multiply<11, Lines>, multiply<12, Lines>,
};

// Passes [begin, end) times one panel. The first two share the prefetching of the next panel; with
// a single row the hardware does as well by itself.
void multiply_passes(const Product& p, int64_t begin, int64_t end, int64_t panel, bool more) {
    const char* next = reinterpret_cast<const char*>(p.weight + (panel + 1) * p.pairs() * kPanel);
    const int64_t half = p.pairs() * 64;
    for (int64_t pass = begin; pass < end; ++pass) {
        const int64_t height = p.first_row(pass + 1) - p.first_row(pass);
        if (!more || pass - begin > 1 || p.rows == 1) kKernels<0>[height](p, pass, panel, nullptr);
        else if (end - begin == 1) kKernels<2>[height](p, pass, panel, next);
        else kKernels<1>[height](p, pass, panel, next + (pass - begin) * half);
    }
}

}  // namespace

extern "C" {

// Bytes that `eagle3_pack` fills.
int64_t eagle3_packed_size(int64_t out, int64_t in) {
    return (out + kPanel - 1) / kPanel * kPanel * ((in + 1) / 2) * 4;
}

// weight [out, in] → packed, 64-byte aligned; outputs and inputs that fill up a panel or a pair are
// zero.
void eagle3_pack(const bf16* weight, uint32_t* packed, int64_t out, int64_t in, int64_t threads) {
    const int64_t pairs = (in + 1) / 2, panels = (out + kPanel - 1) / kPanel;
#pragma omp parallel for num_threads(threads)
    for (int64_t panel = 0; panel < panels; ++panel)
        for (int64_t k = 0; k < pairs; ++k)
            for (int64_t lane = 0; lane < kPanel; ++lane) {
                const int64_t row = panel * kPanel + lane;
                const uint32_t low = row < out ? weight[row * in + 2 * k] : 0;
                const uint32_t high =
                    row < out && 2 * k + 1 < in ? weight[row * in + 2 * k + 1] : 0;
                packed[(panel * pairs + k) * kPanel + lane] = low | high << 16;
            }
}

// y [rows, out] = x [rows, in] · weightᵀ + bias; bias may be null.
void eagle3_linear(const bf16* x, const uint32_t* weight, const bf16* bias, bf16* y, int64_t rows,
                   int64_t in, int64_t out, int64_t threads) {
    Product p{reinterpret_cast<const uint32_t*>(x), weight, bias, y, rows, in, out, false};
    const int64_t pairs = p.pairs(), passes = p.passes();
    if ((rows + passes - 1) / passes > kWays || in % 2) {
        static thread_local std::vector<uint32_t> buffer;
        buffer.resize(rows * pairs + passes * kLanes);
        uint32_t* packed = buffer.data();
#pragma omp parallel for num_threads(threads) if (rows * in > kSerialWork)
        for (int64_t pass = 0; pass < passes; ++pass) {
            const int64_t first = p.first_row(pass);
            pack_rows(x + first * in, p.first_row(pass + 1) - first, in,
                      packed + first * pairs + pass * kLanes);
        }
        p.x = packed, p.packed = true;
    }
    const int64_t pass_bytes = 4 * std::max<int64_t>(pairs, 1) * kRows;
    const int64_t chunk = std::max<int64_t>(1, kChunkBytes / pass_bytes);  // passes
    const int64_t chunks = (passes + chunk - 1) / chunk, tasks = chunks * p.panels();
#pragma omp parallel num_threads(threads) if (rows * in * out > kSerialWork)
    {
        // A contiguous share each: all panels of one chunk of rows come before the next chunk.
        const int64_t thread = omp_get_thread_num(), team = omp_get_num_threads();
        const int64_t last = tasks * (thread + 1) / team;
        for (int64_t task = tasks * thread / team; task < last; ++task) {
            const int64_t begin = task / p.panels() * chunk, panel = task % p.panels();
            multiply_passes(p, begin, std::min(begin + chunk, passes), panel,
                            task + 1 < last && panel + 1 < p.panels());
        }
    }
}

}  // extern "C"
