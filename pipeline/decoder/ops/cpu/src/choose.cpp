// From logits to tokens, trees and accepted branches.
#include "kernels.h"

#include <vector>

namespace {

constexpr int64_t kMostProposed = 64;

// Sixteen logits; what lies after the end is less than all.
F16 logits_at(const Act* from, int64_t live) {
    if (live >= kLanes) return load(from);
    float padded[kLanes];
    for (int64_t i = 0; i < kLanes; ++i)
        padded[i] = i < live ? widen(from[i]) : -std::numeric_limits<float>::infinity();
    return load(padded);
}

// Index of the largest of `size` logits, the lowest of equals; -1 where one is NaN.
int64_t index_of_largest(const Act* logits, int64_t size) {
    F16 best = all(-std::numeric_limits<float>::infinity());
    uint32_t nan = 0;
    for (int64_t i = 0; i < size; i += kLanes) {
        const F16 v = logits_at(logits + i, size - i);
        nan |= nans(v);
        best = max(v, best);
    }
    if (nan) return -1;
    best = all(largest(best));
    for (int64_t i = 0;; i += kLanes)
        if (const uint32_t hit = equal(logits_at(logits + i, size - i), best))
            return i + __builtin_ctz(hit);
}

// The `k` largest logits and their indices, best first, the lower index first of equals.
void best(const Act* logits, int64_t size, int64_t k, float* score, int64_t* index) {
    int64_t held = 0;
    for (int64_t i = 0; i < size; i += kLanes) {
        uint32_t worth = size - i >= kLanes ? 0xFFFF : (1u << (size - i)) - 1;
        if (held == k) worth &= greater(logits_at(logits + i, size - i), all(score[k - 1]));
        for (; worth; worth &= worth - 1) {
            const int64_t at = i + __builtin_ctz(worth);
            const float v = widen(logits[at]);
            if (held == k && !(v > score[k - 1])) continue;
            int64_t position = held < k ? held++ : k - 1;
            for (; position > 0 && score[position - 1] < v; --position)
                score[position] = score[position - 1], index[position] = index[position - 1];
            score[position] = v;
            index[position] = at;
        }
    }
}

float log_sum_exp(const Act* logits, int64_t size, float most) {
    F16 total = zero();
    for (int64_t i = 0; i < size; i += kLanes)
        total = total + exp2((logits_at(logits + i, size - i) - all(most)) * all(kLog2e));
    return most + std::log(sum(total));
}

// A number that orders as torch sorts: NaN above everything, both zeros equal.
int32_t rank(float score) {
    if (score != score) return std::numeric_limits<int32_t>::max();
    int32_t bits;
    score += 0.0f;
    std::memcpy(&bits, &score, sizeof bits);
    return bits < 0 ? bits ^ std::numeric_limits<int32_t>::max() : bits;
}

}  // namespace

extern "C" {

int64_t eagle3_most_proposed() { return kMostProposed; }

// logits [rows, size] → index [rows].
void eagle3_argmax(const Act* logits, int64_t* index, int64_t rows, int64_t size,
                   int64_t threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * size > 1 << 15)
    for (int64_t row = 0; row < rows; ++row) index[row] = index_of_largest(logits + row * size, size);
}

// logits [rows, size] → log-probabilities and indices [rows, k], best first; k at most
// `kMostProposed`.
void eagle3_propose(const Act* logits, float* score, int64_t* index, int64_t k, int64_t rows,
                    int64_t size, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * size > 1 << 15)
    for (int64_t row = 0; row < rows; ++row) {
        const Act* from = logits + row * size;
        best(from, size, k, score + row * k, index + row * k);
        const float log_sum = log_sum_exp(from, size, score[row * k]);
        for (int64_t i = 0; i < k; ++i) score[row * k + i] -= log_sum;
    }
}

// Candidates [rows, count] below roots [rows] → the best `below` of each row after its root: four
// arrays [rows, below + 1]; see grow_tree of base.py.
void eagle3_grow_tree(const int64_t* roots, const int64_t* tokens, const int64_t* parents,
                      const float* scores, int64_t* tree_tokens, int64_t* tree_parents,
                      int64_t* tree_mask, int64_t* depth, int64_t rows, int64_t count,
                      int64_t below) {
    std::vector<int64_t> order(count), node_of(count);
    for (int64_t row = 0; row < rows; ++row) {
        const float* score = scores + row * count;
        for (int64_t i = 0; i < count; ++i) order[i] = i, node_of[i] = 0;
        const auto better = [&](int64_t a, int64_t b) {
            return rank(score[a]) != rank(score[b]) ? rank(score[a]) > rank(score[b]) : a < b;
        };
        if (below < count)
            std::nth_element(order.begin(), order.begin() + below, order.end(), better);
        std::sort(order.begin(), order.begin() + below);
        const int64_t at = row * (below + 1);
        tree_tokens[at] = roots[row], tree_parents[at] = 0, tree_mask[at] = 1, depth[at] = 0;
        for (int64_t node = 1; node <= below; ++node) {
            const int64_t candidate = order[node - 1], above = parents[row * count + candidate];
            const int64_t parent = above < 0 ? 0 : node_of[above];
            node_of[candidate] = node;
            tree_tokens[at + node] = tokens[row * count + candidate];
            tree_parents[at + node] = parent;
            const uint64_t bit = uint64_t{1} << node;
            tree_mask[at + node] = tree_mask[at + parent] | static_cast<int64_t>(bit);
            depth[at + node] = depth[at + parent] + 1;
        }
    }
}

// The k best of the k · k continuations of k beams a row; see select_beams of base.py. `bytes` is
// the size of one hidden state.
void eagle3_select_beams(const float* score, const float* gained, const int64_t* proposed,
                         const int64_t* beam_mask, const char* hidden, const int64_t* bits,
                         float* total, int64_t* best, float* kept_score, int64_t* token,
                         int64_t* kept_mask, char* kept_hidden, int64_t rows, int64_t k,
                         int64_t bytes) {
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t beams = row * k, all = beams * k;
        for (int64_t i = 0; i < k * k; ++i) total[all + i] = score[beams + i / k] + gained[all + i];
        std::vector<int64_t> order(k * k);
        for (int64_t i = 0; i < k * k; ++i) order[i] = i;
        const auto better = [&](int64_t a, int64_t b) {
            const int32_t left = rank(total[all + a]), right = rank(total[all + b]);
            return left != right ? left > right : a < b;
        };
        std::partial_sort(order.begin(), order.begin() + k, order.end(), better);
        for (int64_t i = 0; i < k; ++i) {
            const int64_t at = order[i], above = beams + at / k;
            best[beams + i] = at;
            kept_score[beams + i] = total[all + at];
            token[beams + i] = proposed[all + at];
            kept_mask[beams + i] = beam_mask[above] | bits[beams + i];
            std::memcpy(kept_hidden + (beams + i) * bytes, hidden + above * bytes, bytes);
        }
    }
}

// Walk the branch that agrees with `predicted`: trees [rows, nodes] → path and emitted tokens
// [rows, depth + 1], counts [rows].
void eagle3_verify(const int64_t* tokens, const int64_t* parents, const int64_t* predicted,
                   int64_t* path, int64_t* counts, int64_t* emitted, int64_t rows, int64_t nodes,
                   int64_t depth) {
    for (int64_t row = 0; row < rows; ++row) {
        int64_t node = 0, length = 1;
        path[0] = 0, emitted[0] = predicted[0];
        for (int64_t step = 1; step <= depth; ++step) {
            int64_t child = 1;
            while (child < nodes && !(parents[child] == node && tokens[child] == predicted[node]))
                ++child;
            if (child < nodes) node = child, ++length;
            path[step] = node, emitted[step] = predicted[node];
        }
        counts[row] = length;
        tokens += nodes, parents += nodes, predicted += nodes;
        path += depth + 1, emitted += depth + 1;
    }
}

// Move entry seq_len + path[e] to seq_len + e in each of `planes` planes [pages, groups, page,
// bytes]. In place and in order: an entry is overwritten only by one that comes after it. Repeats
// of the last node, which only fill up the path, stay where they are.
void eagle3_compact(char* data, const int64_t* block_table, const int64_t* seq_lens,
                    const int64_t* path, int64_t planes, int64_t pages, int64_t groups,
                    int64_t page, int64_t bytes, int64_t rows, int64_t row_pages, int64_t length,
                    int64_t threads) {
    const auto offset = [&](int64_t row, int64_t entry) {
        return (block_table[row * row_pages + entry / page] * groups * page + entry % page) * bytes;
    };
#pragma omp parallel for num_threads(threads) if (planes * rows * length * groups * bytes > 1 << 16)
    for (int64_t plane = 0; plane < planes; ++plane) {
        char* base = data + plane * pages * groups * page * bytes;
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t e = 0; e < length; ++e) {
                const int64_t node = path[row * length + e];
                if (node == e || (e > 0 && node == path[row * length + e - 1])) continue;
                char *to = base + offset(row, seq_lens[row] + e),
                     *from = base + offset(row, seq_lens[row] + node);
                for (int64_t group = 0; group < groups; ++group)
                    std::memcpy(to + group * page * bytes, from + group * page * bytes, bytes);
            }
    }
}

}  // extern "C"
