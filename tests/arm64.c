/* Runs one kernel for ARM under qemu, without a C library. Input: the kernel's number, a mask of the arguments that are
   offsets in the memory, the memory's size, seven arguments, and the memory; output: the memory. See test_arm64.py. */
typedef long word;
typedef unsigned char byte;
#define KINDS K(F32) K(F16) K(BF16) K(Q4_0) K(Q4_1) K(Q5_0) K(Q5_1) K(Q8_0) K(Q4_K) K(Q5_K) K(Q6_K)
#define K(k) \
  word pack_##k(word, word, word, word, word, word, word); \
  word decode_##k(word, word, word, word); \
  word gemm_##k(word, word, word, word, word, word);
KINDS
#undef K

static byte memory[8 << 20] __attribute__((aligned(4096)));
static word head[10];

static word call_system(word number, word a, word b, word c) {
  register word x8 __asm__("x8") = number;
  register word x0 __asm__("x0") = a;
  register word x1 __asm__("x1") = b;
  register word x2 __asm__("x2") = c;
  __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2) : "memory");
  return x0;
}

/* 63 reads, 64 writes, 93 ends the process. */
static void move(word call, word file, void *place, word size) {
  for (byte *at = place; size > 0;) {
    word done = call_system(call, file, (word)at, size);
    if (done <= 0) call_system(93, 1, 0, 0);
    at += done;
    size -= done;
  }
}

void *memset(void *place, int value, unsigned long size) {
  volatile byte *bytes = place;
  for (unsigned long i = 0; i < size; i++) bytes[i] = value;
  return place;
}

void _start(void) {
  word a[7], number = 0;
  move(63, 0, head, sizeof head);
  move(63, 0, memory, head[2]);
  for (int i = 0; i < 7; i++) a[i] = head[3 + i] + (head[1] >> i & 1 ? (word)memory : 0);
#define K(k) \
  if (head[0] == number++) pack_##k(a[0], a[1], a[2], a[3], a[4], a[5], a[6]); \
  if (head[0] == number++) decode_##k(a[0], a[1], a[2], a[3]); \
  if (head[0] == number++) gemm_##k(a[0], a[1], a[2], a[3], a[4], a[5]);
  KINDS
  move(64, 1, memory, head[2]);
  call_system(93, 0, 0, 0);
}
