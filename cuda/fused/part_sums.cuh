// Sums of the parts of a layer that cards have, exchanged row by row inside the kernel that goes on with them.
//
// Each card has the sum of its part for every row. The block that goes on with a row stores it to the memory of the other
// cards as flagged words (arch/messages.cuh), and polls for theirs in its own; so a row takes one way between two cards, and
// no launch ends for it. A card's inbox has two places for each word, which steps fill in turns: what a step stores, the
// other card has read in the step before the last, since it could not have sent the last one's otherwise.
//
// The same block of each card must run at once: all blocks of the launch have room on the card together.
#pragma once

#include "arch/messages.cuh"

namespace mlpgpu {

// The words of a table: how many parts there are, and which one is this card's; where the counts of the rows' messages
// begin, behind a word that tells later launches that no more will come; where the inbox of each part's card begins, this
// card's own included. An inbox is (2, parts, rows, columns). Addresses are offsets from `memory`, which is null where they
// are whole.
struct PartSums {
    static constexpr int HEAD = 3;
    const int64_t* table;
    const unsigned* aborted;  // set by the host to end every wait
    unsigned char* memory;
    int64_t size;  // elements of a part: rows · columns

    __device__ __forceinline__ int count() const { return static_cast<int>(table[0]); }
    __device__ __forceinline__ int own() const { return static_cast<int>(table[1]); }
    // A row's messages so far, which number the next one.
    __device__ __forceinline__ unsigned* sent(int row) const { return ended() + 1 + row; }

    // The sum of all parts at element i, added in their order; this card's part has `sum`.
    __device__ __forceinline__ float all(float sum, int64_t i, uint32_t sequence) const {
        for (int part = 0; part < count(); ++part)
            if (part != own()) store_word_for_card(word(part, own(), i, sequence), FlaggedWord::of(sum, sequence).word);
        float total = 0.0f;
        for (int part = 0; part < count(); ++part)
            total += part == own() ? sum : receive(word(own(), part, i, sequence), sequence);
        return total;
    }

private:
    __device__ __forceinline__ unsigned* ended() const { return reinterpret_cast<unsigned*>(at(table[2])); }
    __device__ __forceinline__ unsigned char* at(int64_t offset) const {
        return reinterpret_cast<unsigned char*>(reinterpret_cast<uint64_t>(memory) + offset);
    }
    // Where a part's element lies in the inbox of the card that has part `to`.
    __device__ __forceinline__ uint64_t* word(int to, int part, int64_t i, uint32_t sequence) const {
        return reinterpret_cast<uint64_t*>(at(table[HEAD + to])) + (sequence % 2 * count() + part) * size + i;
    }
    __device__ __forceinline__ float receive(const uint64_t* address, uint32_t sequence) const {
        FlaggedWord found = {load_word_from_card(address)};
        for (unsigned round = 1; !found.has_arrived(sequence) && !has_ended(round); ++round) {
            pause_spinning();
            found.word = load_word_from_card(address);
        }
        return found.value();
    }
    // Whether the host says that no more will come. It is asked every ten milliseconds or so: if all threads asked whenever the
    // other card is late, the host would answer later than that card. What it said the card remembers.
    __device__ __forceinline__ bool has_ended(unsigned round) const {
        constexpr unsigned ROUNDS = 256, ROUNDS_OF_HOST = 1 << 16;
        if (round % ROUNDS != 0) return false;
        if (round % ROUNDS_OF_HOST == 0 && load_from_card(aborted) != 0) *ended() = 1;
        return __ldcg(ended()) != 0;
    }
};

}  // namespace mlpgpu
