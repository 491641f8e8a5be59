// All steps of an EAGLE-3 head's draft in one call: `draft_beams` of draft.py, which draws the
// entries. A step reads little beside a forward of the target: a dozen calls from Python would show.
#include "kernels.h"

#include <vector>

extern "C" {

struct DraftHead {  // DraftHead of draft.py
    const Layer* layer;
    const Matrix* lm_head;
    const Act* embedding;
    const float *embed_norm, *hidden_norm;
    const int64_t* target_ids;
    int64_t norm_output, norm_before_residual, layers, vocabulary;  // rows of the embedding
};

struct Noise {  // DraftNoise of draft.py; all null where all rows are greedy
    const float* weights;
    const int64_t *seeds, *positions;
};

}

namespace {

// k beams of each of `rows` rows, and what they propose.
struct Beams {
    int64_t rows, k, all = rows * k;
    std::vector<int64_t> token = numbers(all), beam_mask = numbers(all), above = numbers(all);
    std::vector<float> score = std::vector<float>(all);
    // k of each beam: ids of the draft vocabulary, then of the target's.
    std::vector<int64_t> proposed = numbers(all * k);
    std::vector<float> gained = std::vector<float>(all * k);

    static std::vector<int64_t> numbers(int64_t count) { return std::vector<int64_t>(count); }
};

// Logits of `count` normed outputs `depth` deep, and the best k of each once they have their noise,
// in `noisy`. Returns a proposed token that the embedding has no row for, or `kInside`.
int64_t propose(const DraftHead& head, const Act* normed, Act* logits, const Noise& noise,
                std::vector<Act>& noisy, Beams& beams, int64_t count, int64_t depth,
                int64_t threads) {
    const int64_t k = beams.k, size = head.lm_head->out;
    eagle3_linear(normed, head.lm_head, nullptr, logits, count, threads, head.layer->qkv);
    const Act* perturbed = logits;
    if (noise.seeds) {
        noisy.resize(count * size);
        eagle3_perturb_drafts(logits, noisy.data(), head.target_ids, noise.weights, noise.seeds,
                              noise.positions, depth, beams.rows, count / beams.rows, size,
                              threads);
        perturbed = noisy.data();
    }
    eagle3_propose(perturbed, beams.gained.data(), beams.proposed.data(), k, count, size,
                   threads);
    for (int64_t i = 0; i < count * k; ++i) {
        beams.proposed[i] = head.target_ids[beams.proposed[i]];
        if (beams.proposed[i] < 0 || beams.proposed[i] >= head.vocabulary) return beams.proposed[i];
    }
    return kInside;
}

}  // namespace

extern "C" {

// state [rows, hidden] → tokens, parents, scores [rows, candidates], candidates being
// k + (steps - 1) k². Keys and values of drafted entries go to `plane`, of two sides of `side`
// numbers. `metadata` says which rows there are, and the position of each one's first drafted token;
// its tokens are none; drafted tokens of depth 1 stand at `first` where they are drawn with noise.
// `logits` has room for a step's,
// or with `keep` for all of them, one after the other. Returns `kInside`, or the first proposed
// token that the embedding has no row for: then nothing that was written is a draft.
int64_t eagle3_draft_beams(const DraftHead* head, const Metadata* metadata, const Act* state,
                           Act* plane, int64_t side, int64_t* tokens, int64_t* parents,
                           float* scores, Act* logits, const float* weights,
                           const int64_t* seeds, const int64_t* first, int64_t keep, int64_t steps,
                           int64_t k, float eps, int64_t threads) {
    const int64_t size = head->layer->output->out, rows = metadata->rows, all = rows * k;
    const int64_t candidates = k + (steps - 1) * k * k;
    Beams beams{rows, k}, next{rows, k};
    std::vector<Act> normed(all * size), hidden(all * size), other(all * size),
        joined(all * 2 * size), noisy;
    const Noise noise{weights, seeds, first};

    const Act* read = state;
    if (!head->norm_output) {
        eagle3_add_rms_norm(state, nullptr, nullptr, head->layer[head->layers - 1].norm,
                            normed.data(), nullptr, eps, rows, size, threads);
        read = normed.data();
    }
    int64_t outside = propose(*head, read, logits, noise, noisy, beams, rows, 0, threads);
    if (outside != kInside) return outside;
    if (keep) logits += rows * head->lm_head->out;
    for (int64_t beam = 0; beam < all; ++beam) {
        const int64_t row = beam / k, i = beam % k, at = row * candidates + i;
        tokens[at] = beams.token[beam] = beams.proposed[beam];
        scores[at] = beams.score[beam] = beams.gained[beam];
        parents[at] = -1, beams.above[beam] = i, beams.beam_mask[beam] = int64_t{1} << i;
        std::memcpy(&hidden[beam * size], state + row * size, size * sizeof(Act));
    }

    std::vector<int64_t> positions(all), slot_mapping(all), starts(rows + 1), bits(all), best(all);
    std::vector<float> total(all * k);
    for (int64_t row = 0; row <= rows; ++row) starts[row] = row * k;
    for (int64_t step = 1; step < steps; ++step) {
        const int64_t first = k + (step - 1) * k * k;  // of the candidates of this step
        for (int64_t beam = 0; beam < all; ++beam) {
            const int64_t row = beam / k, length = metadata->seq_lens[row];
            const int64_t entry = length + (step - 1) * k + beam % k;
            const int64_t page = metadata->block_table[row * metadata->pages + entry / kPage];
            positions[beam] = metadata->positions[row] + step - 1;
            slot_mapping[beam] = page * kPage + entry % kPage;
            // Entries of the last step are never written.
            bits[beam] = step + 1 < steps ? int64_t{1} << (step * k + beam % k) : 0;
        }
        Metadata here = *metadata;
        here.positions = positions.data(), here.slot_mapping = slot_mapping.data();
        here.cu_seqlens_q = starts.data(), here.mask = beams.beam_mask.data(), here.tokens = all;
        eagle3_embed_concat(beams.token.data(), head->embedding, hidden.data(), head->embed_norm,
                            head->hidden_norm, joined.data(), eps, all, size, head->vocabulary);
        if (head->norm_before_residual)
            for (int64_t beam = 0; beam < all; ++beam)
                std::memcpy(&hidden[beam * size], &joined[(2 * beam + 1) * size],
                            size * sizeof(Act));
        eagle3_layers(head->layer, head->layers, &here, joined.data(), hidden.data(), normed.data(),
                      plane, side, nullptr, 0, eps, threads);
        outside = propose(*head, normed.data(), logits, noise, noisy, beams, all, step, threads);
        if (outside != kInside) return outside;
        if (keep) logits += all * head->lm_head->out;
        const Act* output = head->norm_output ? normed.data() : hidden.data();
        eagle3_select_beams(beams.score.data(), beams.gained.data(), beams.proposed.data(),
                            beams.beam_mask.data(), reinterpret_cast<const char*>(output),
                            bits.data(), total.data(), best.data(), next.score.data(),
                            next.token.data(), next.beam_mask.data(),
                            reinterpret_cast<char*>(other.data()), rows, k, size * sizeof(Act));
        for (int64_t beam = 0; beam < all; ++beam) {
            const int64_t at = beam / k * candidates + first;
            for (int64_t i = 0; i < k; ++i) {
                const int64_t to = at + beam % k * k + i, from = beam * k + i;
                tokens[to] = beams.proposed[from], scores[to] = total[from];
                parents[to] = beams.above[beam];
            }
            next.above[beam] = first + best[beam];
        }
        std::swap(beams, next);
        std::swap(hidden, other);
    }
    return kInside;
}

}  // extern "C"
