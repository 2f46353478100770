// A call of a kernel kept as words, one an argument, so that it can be made again without the interpreter.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace kvasir {

using Word = int64_t;

// The front bytes of the word: numbers are little endian on all processors that these kernels are built for.
template <typename T>
T from_word(const Word& word) {
    T value;
    memcpy(&value, &word, sizeof(T));
    return value;
}

template <typename... Arguments, size_t... I>
void call_with(void (*kernel)(Arguments...), const Word* words, std::index_sequence<I...>) {
    kernel(from_word<Arguments>(words[I])...);
}

template <typename... Arguments>
void call_with(void (*kernel)(Arguments...), const Word* words) {
    call_with(kernel, words, std::index_sequence_for<Arguments...>{});
}

}  // namespace kvasir

// Defines NAME_again(words), which calls the kernel NAME with them.
#define KVASIR_REPLAYABLE(name) \
    extern "C" void name##_again(const kvasir::Word* words) { kvasir::call_with(name, words); }
