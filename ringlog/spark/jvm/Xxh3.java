package ringlog.spark;

import org.apache.spark.unsafe.Platform;

/** XXH3 with 64 bits and without a seed, for memory of at least 4 bytes (a frame's body has at least 8). */
final class Xxh3 {
  private static final long P32_1 = 0x9E3779B1L;
  private static final long P32_2 = 0x85EBCA77L;
  private static final long P32_3 = 0xC2B2AE3DL;
  private static final long P64_1 = 0x9E3779B185EBCA87L;
  private static final long P64_2 = 0xC2B2AE3D27D4EB4FL;
  private static final long P64_3 = 0x165667B19E3779F9L;
  private static final long P64_4 = 0x85EBCA77C2B2AE63L;
  private static final long P64_5 = 0x27D4EB2F165667C5L;
  private static final long MX1 = 0x165667919E3779F9L;
  private static final long MX2 = 0x9FB21C651E98DF25L;
  private static final int STRIPE = 64;
  private static final int STRIPES = 16;

  private static final String SECRET_HEX =
      "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
          + "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
          + "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
          + "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
          + "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
          + "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e";

  private static final byte[] SECRET = secret();
  private static final long[] KEYS = new long[24];

  static {
    for (int i = 0; i < KEYS.length; i++) {
      KEYS[i] = key(8 * i);
    }
  }

  private Xxh3() {}

  private static byte[] secret() {
    byte[] found = new byte[192];
    for (int i = 0; i < SECRET_HEX.length() / 2; i++) {
      found[i] = (byte) Integer.parseInt(SECRET_HEX.substring(2 * i, 2 * i + 2), 16);
    }
    return found;
  }

  private static long key(int at) {
    return Platform.getLong(SECRET, Platform.BYTE_ARRAY_OFFSET + at);
  }

  private static long read(long at) {
    return Platform.getLong(null, at);
  }

  private static long folded(long a, long b) {
    long high = Math.multiplyHigh(a, b) + ((a >> 63) & b) + ((b >> 63) & a);
    return (a * b) ^ high;
  }

  private static long mixed(long at, int secret) {
    return folded(read(at) ^ key(secret), read(at + 8) ^ key(secret + 8));
  }

  private static long avalanche(long h) {
    h ^= h >>> 37;
    h *= MX1;
    return h ^ (h >>> 32);
  }

  /** Return the hash of `length` (>= 4) bytes at an address. */
  static long of(long at, int length) {
    if (length > 240) {
      return ofMany(at, length);
    }
    if (length > 128) {
      return upTo240(at, length);
    }
    if (length > 16) {
      return upTo128(at, length);
    }
    if (length > 8) {
      long low = read(at) ^ (key(24) ^ key(32));
      long high = read(at + length - 8) ^ (key(40) ^ key(48));
      return avalanche(length + Long.reverseBytes(low) + high + folded(low, high));
    }
    long first = Platform.getInt(null, at) & 0xFFFFFFFFL;
    long last = Platform.getInt(null, at + length - 4) & 0xFFFFFFFFL;
    long h = (last + (first << 32)) ^ (key(8) ^ key(16));
    h ^= Long.rotateLeft(h, 49) ^ Long.rotateLeft(h, 24);
    h *= MX2;
    h ^= (h >>> 35) + length;
    h *= MX2;
    return h ^ (h >>> 28);
  }

  private static long upTo128(long at, int length) {
    long acc = length * P64_1;
    for (int i = (length - 1) / 32; i >= 0; i--) {
      acc += mixed(at + 16L * i, 32 * i) + mixed(at + length - 16L * (i + 1), 32 * i + 16);
    }
    return avalanche(acc);
  }

  private static long upTo240(long at, int length) {
    long acc = length * P64_1;
    for (int i = 0; i < 8; i++) {
      acc += mixed(at + 16L * i, 16 * i);
    }
    acc = avalanche(acc);
    for (int i = 8; i < length / 16; i++) {
      acc += mixed(at + 16L * i, 16 * (i - 8) + 3);
    }
    return avalanche(acc + mixed(at + length - 16, 119));
  }

  private static long product(long value) {
    return (value & 0xFFFFFFFFL) * (value >>> 32);
  }

  private static long scrambled(long acc, long key) {
    return (acc ^ (acc >>> 47) ^ key) * P32_1;
  }

  private static long ofMany(long at, int length) {
    final long[] keys = KEYS;
    long a0 = P32_3, a1 = P64_1, a2 = P64_2, a3 = P64_3, a4 = P64_4, a5 = P32_2, a6 = P64_5, a7 = P32_1;
    int stripes = (length - 1) / STRIPE;
    long last = at + length - STRIPE;
    // The final pass hashes the last 64 bytes with separate keys. They may overlap the stripe before.
    for (int n = 0; n <= stripes; n++) {
      boolean isLast = n == stripes;
      int k = n & (STRIPES - 1);
      long d0, d1, d2, d3, d4, d5, d6, d7;
      long k0, k1, k2, k3, k4, k5, k6, k7;
      if (isLast) {
        k0 = key(121); k1 = key(129); k2 = key(137); k3 = key(145);
        k4 = key(153); k5 = key(161); k6 = key(169); k7 = key(177);
        at = last;
      } else {
        k0 = keys[k]; k1 = keys[k + 1]; k2 = keys[k + 2]; k3 = keys[k + 3];
        k4 = keys[k + 4]; k5 = keys[k + 5]; k6 = keys[k + 6]; k7 = keys[k + 7];
      }
      d0 = read(at); d1 = read(at + 8); d2 = read(at + 16); d3 = read(at + 24);
      d4 = read(at + 32); d5 = read(at + 40); d6 = read(at + 48); d7 = read(at + 56);
      a0 += d1 + product(d0 ^ k0);
      a1 += d0 + product(d1 ^ k1);
      a2 += d3 + product(d2 ^ k2);
      a3 += d2 + product(d3 ^ k3);
      a4 += d5 + product(d4 ^ k4);
      a5 += d4 + product(d5 ^ k5);
      a6 += d7 + product(d6 ^ k6);
      a7 += d6 + product(d7 ^ k7);
      at += STRIPE;
      if (k == STRIPES - 1 && !isLast) {
        a0 = scrambled(a0, keys[16]); a1 = scrambled(a1, keys[17]);
        a2 = scrambled(a2, keys[18]); a3 = scrambled(a3, keys[19]);
        a4 = scrambled(a4, keys[20]); a5 = scrambled(a5, keys[21]);
        a6 = scrambled(a6, keys[22]); a7 = scrambled(a7, keys[23]);
      }
    }
    long h = length * P64_1;
    h += folded(a0 ^ key(11), a1 ^ key(19));
    h += folded(a2 ^ key(27), a3 ^ key(35));
    h += folded(a4 ^ key(43), a5 ^ key(51));
    h += folded(a6 ^ key(59), a7 ^ key(67));
    return avalanche(h);
  }
}
