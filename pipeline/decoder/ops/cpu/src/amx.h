// Matrix products with AMX tiles: sixteen rows of x by sixteen outputs by sixteen pairs at a time.
//
//     A   rows of x          [≤ 16][16 pairs]        tiles 4, 5: two blocks of rows
//     B   a panel's halves   [16 pairs][16 outputs]  tiles 6, 7: as they are packed
//     C   float32            [≤ 16][16 outputs]      tiles 0 … 3
//
// Tiles add up even and odd inputs apart and flush denormals, so a row alone goes through them too:
// it gets the bits that it has among others.
#pragma once

#include "kernels.h"

#if defined(__AMX_BF16__) && !defined(EAGLE3_FLOAT32)

constexpr bool kTiles = true;
constexpr int64_t kTilePairs = 16, kTileRows = 16;
constexpr int64_t kTileStreams = 8;  // of prefetching

// Pairs of inputs that a packed weight has: whole tiles of them.
inline int64_t packed_pairs(int64_t in) { return (in + 31) / 32 * kTilePairs; }

// The thread's tiles for products of `rows` rows, until this goes out of scope.
class Tiles {
public:
    explicit Tiles(int64_t rows) {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        const uint8_t upper = std::min(rows, kTileRows);
        const uint8_t lower = rows <= kTileRows ? 1 : std::min(rows - kTileRows, kTileRows);
        const uint8_t heights[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
        for (int tile = 0; tile < 8; ++tile)
            config.bytes[tile] = 64, config.rows[tile] = heights[tile];
        _tile_loadconfig(&config);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
};

// One or two tiles of rows from x on times a panel: sums [32][32]. As many bytes at `ahead` are
// prefetched, if it is not null.
template <int Blocks>
inline void multiply_blocks(const uint32_t* x, int64_t stride, const char* weight, int64_t pairs,
                            float* sums, const char* ahead) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (Blocks == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < pairs; k += kTilePairs) {
        const char* step = weight + k * 128;
        if (ahead)
            for (int64_t line = 2 * k; line < 2 * (k + kTilePairs); ++line)
                prefetch_line<kTileStreams>(ahead, 2 * pairs, line);
        _tile_loadd(4, x + k, stride * 4);
        _tile_loadd(6, step, 128);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, step + 64, 128);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (Blocks == 2) {
            _tile_loadd(5, x + kTileRows * stride + k, stride * 4);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
    if constexpr (Blocks == 2) {
        _tile_stored(2, sums + kTileRows * 32, 128);
        _tile_stored(3, sums + kTileRows * 32 + 16, 128);
    }
}

// Rows [begin, end) of x times the panel of the outputs from `at` on.
inline void multiply_tiles(const uint32_t* x, int64_t stride, const char* weight, int64_t pairs,
                           const Act* bias, Act* y, int64_t begin, int64_t end, int64_t rows,
                           int64_t at, int64_t out, const char* ahead) {
    alignas(64) float sums[2 * kTileRows * 32];
    // The heights of tiles are those of all rows: of more than 32, blocks are whole, and the last
    // ones overlap.
    for (int64_t row = begin; row < end; row += 2 * kTileRows) {
        int64_t from = row;
        if (rows > 2 * kTileRows) from = std::min(row, rows - 2 * kTileRows);
        const int64_t height = std::min(2 * kTileRows, rows - from);
        const uint32_t* at_row = x + from * stride;
        if (height <= kTileRows) multiply_blocks<1>(at_row, stride, weight, pairs, sums, ahead);
        else multiply_blocks<2>(at_row, stride, weight, pairs, sums, row == begin ? ahead : nullptr);
        for (int64_t half = 0; half < 2; ++half) {
            const int64_t first = at + half * kLanes, live = out - first;
            if (live <= 0) break;
            const F16 added = bias ? load(bias + first, live) : zero();
            for (int64_t r = row - from; r < height && from + r < end; ++r)
                store(y + (from + r) * out + first, load(sums + r * 32 + half * kLanes) + added,
                      live);
        }
    }
}

#else

constexpr bool kTiles = false;
inline int64_t packed_pairs(int64_t in) { return (in + 1) / 2; }
struct Tiles {
    explicit Tiles(int64_t) {}
    ~Tiles() {}
};
inline void multiply_tiles(const uint32_t*, int64_t, const char*, int64_t, const Act*, Act*,
                           int64_t, int64_t, int64_t, int64_t, int64_t, const char*) {}

#endif
