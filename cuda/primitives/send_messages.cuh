// Messages between cards that reach each other's memory, by one launch on each of them.
//
//     this card                                     a receiver's card
//     waits for its word "ready"  <-------------    "ready": what it was sent before is read
//     copies, then "done"         ------------->    waits for its word "done"
//
// Each block has a share of every message, and words of its own, so that no block waits for another one of its card. A word
// lies in the memory of the card that waits for it, which sets it to 0 again. Launches before this one on its stream have
// read the messages sent before, so their memory may be written; launches behind it find the new ones.
#pragma once

#include "common/portable.cuh"

namespace mlpgpu {

constexpr int WORDS_APART = 8;  // the words of two blocks, each of which has a sector of 32 bytes

// The words of a table: how many receivers, senders and messages there are; of each receiver the word that this card waits for,
// and the one that it writes; of each sender likewise; of each message from where to where how many bytes go. Addresses are
// offsets from `memory`, which is null where they are whole.
struct MessageTable {
    const int64_t* words;
    unsigned char* memory;
    static constexpr int HEAD = 3, OF_PEER = 2, OF_MESSAGE = 3;

    __device__ __forceinline__ int receivers() const { return static_cast<int>(words[0]); }
    __device__ __forceinline__ int peers() const { return static_cast<int>(words[0] + words[1]); }
    __device__ __forceinline__ int messages() const { return static_cast<int>(words[2]); }
    __device__ __forceinline__ const int64_t* message(int i) const {
        return words + HEAD + OF_PEER * peers() + OF_MESSAGE * i;
    }
    __device__ __forceinline__ unsigned char* at(int64_t offset) const {
        return reinterpret_cast<unsigned char*>(reinterpret_cast<uint64_t>(memory) + offset);
    }
    __device__ __forceinline__ unsigned* awaited(int peer) const { return word_of(words[HEAD + OF_PEER * peer]); }
    __device__ __forceinline__ unsigned* told(int peer) const { return word_of(words[HEAD + OF_PEER * peer + 1]); }

private:
    __device__ __forceinline__ unsigned* word_of(int64_t offset) const {
        return reinterpret_cast<unsigned*>(at(offset)) + blockIdx.x * WORDS_APART;
    }
};

// Waits for a word and sets it to 0 again, or goes on where the host says that no more will come.
__device__ __forceinline__ void await_word(unsigned* word, const unsigned* aborted) {
    constexpr unsigned ROUNDS = 256;  // between two looks at memory of the host, which answers late
    for (unsigned round = 1; load_from_card(word) == 0; ++round) {
        pause_spinning();
        if (round % ROUNDS == 0 && load_from_card(aborted) != 0) return;
    }
    *word = 0;
}

// The block's share of `bytes` bytes, word by word.
template <class Word>
__device__ __forceinline__ void copy_share(const unsigned char* from, unsigned char* to, int64_t bytes) {
    constexpr int DEPTH = 4;
    const Word* const source = reinterpret_cast<const Word*>(from);
    Word* const target = reinterpret_cast<Word*>(to);
    const int64_t count = bytes / sizeof(Word), stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count; i += DEPTH * stride) {
        Word held[DEPTH];
#pragma unroll
        for (int j = 0; j < DEPTH; ++j)
            if (i + j * stride < count) held[j] = source[i + j * stride];
#pragma unroll
        for (int j = 0; j < DEPTH; ++j)
            if (i + j * stride < count) target[i + j * stride] = held[j];
    }
}

// Sends the messages of a table, and waits for those that others send; the host sets the word `aborted` to end every wait.
// Grid: the same number of blocks on all cards.
__device__ __forceinline__ void send_messages(const int64_t* table, const unsigned* aborted, unsigned char* memory) {
    const MessageTable of = {table, memory};
    const int peer = threadIdx.x, receivers = of.receivers();
    const bool is_receiver = peer < receivers, is_sender = peer >= receivers && peer < of.peers();
    if (is_sender) store_for_card(of.told(peer), 1);
    if (is_receiver) await_word(of.awaited(peer), aborted);
    __syncthreads();
    for (int i = 0; i < of.messages(); ++i) {
        const int64_t *const message = of.message(i), bytes = message[2];
        const unsigned char* const from = of.at(message[0]);
        unsigned char* const to = of.at(message[1]);
        const int64_t ends = message[0] | message[1] | bytes;
        if (ends % sizeof(uint4) == 0) copy_share<uint4>(from, to, bytes);
        else if (ends % sizeof(unsigned) == 0) copy_share<unsigned>(from, to, bytes);
        else copy_share<unsigned char>(from, to, bytes);
    }
    __threadfence_system();
    __syncthreads();
    if (is_receiver) store_for_card(of.told(peer), 1);
    if (is_sender) await_word(of.awaited(peer), aborted);
}

}  // namespace mlpgpu
