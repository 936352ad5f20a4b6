package ringlog.spark;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.arrow.memory.util.MemoryUtil;
import org.apache.spark.unsafe.Platform;

/**
 * Private memory that frames are copied into before they are checked.
 *
 * <p>The reader uses exactly the bytes that it checked, even if the file changes afterwards. A read error
 * of the disk is an exception; under a memory mapping it would be a signal.
 *
 * <p>Chunks are reused, because touching new memory costs as much as copying into it.
 */
final class Chunk {
  /** Bytes per read, unless one frame is larger. They fit into the CPU's cache along with other data. */
  static final int BYTES = 1 << 20;

  /** Bytes after the data that may be read; their values are undefined. */
  static final int SLACK = 16;

  /** Maximum number of chunks kept for later tasks. Chunks larger than BYTES are never kept. */
  private static final int KEPT_MAX = 16;

  private static final ConcurrentLinkedQueue<Chunk> KEPT = new ConcurrentLinkedQueue<>();
  private static final AtomicInteger KEPT_COUNT = new AtomicInteger();

  private ByteBuffer buffer;

  /** Address of the first byte. reserve, read and copy may change it. */
  long address;

  private Chunk(int size) {
    take(size);
  }

  private void take(int size) {
    buffer = ByteBuffer.allocateDirect(size + SLACK);
    address = MemoryUtil.getByteBufferAddress(buffer);
  }

  /** Return a kept or a new chunk with room for BYTES. */
  static Chunk get() {
    Chunk found = KEPT.poll();
    if (found == null) {
      return new Chunk(BYTES);
    }
    KEPT_COUNT.decrementAndGet();
    return found;
  }

  /** Return this chunk for reuse. The caller must not use it afterwards. */
  void giveBack() {
    if (buffer.capacity() != BYTES + SLACK) {
      return;
    }
    if (KEPT_COUNT.incrementAndGet() > KEPT_MAX) {
      KEPT_COUNT.decrementAndGet();
      return;
    }
    KEPT.add(this);
  }

  /** Make room for `size` bytes. The previous content may be lost. */
  void reserve(int size) {
    if (size + SLACK > buffer.capacity()) {
      take(size);
    }
  }

  /**
   * Copy bytes of a file to the start. Return their number: less than `size` only if the file ends before.
   */
  int read(FileChannel channel, long position, int size) throws IOException {
    reserve(size);
    buffer.clear().limit(size);
    int done = 0;
    while (done < size) {
      int count = channel.read(buffer, position + done);
      if (count < 0) {
        break;
      }
      done += count;
    }
    return done;
  }

  /** Copy bytes of an array to the start. */
  void copy(byte[] from, int at, int size) {
    reserve(size);
    Platform.copyMemory(from, Platform.BYTE_ARRAY_OFFSET + at, null, address, size);
  }

  ByteBuffer view(int from, int size) {
    ByteBuffer found = buffer.duplicate();
    found.clear().position(from).limit(from + size);
    return found;
  }
}
