package ringlog.spark;

import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnarBatch;

/** Creates the reader of a task. Spark serializes the factory and sends it to the executors. */
final class ColumnsFactory implements PartitionReaderFactory {
  private static final long serialVersionUID = 1L;
  private final PartitionReaderFactory pieces;
  private final StructType wanted;
  private final String layout;

  ColumnsFactory(PartitionReaderFactory pieces, StructType wanted, String layout) {
    this.pieces = pieces;
    this.wanted = wanted;
    this.layout = layout;
  }

  @Override
  public boolean supportColumnarReads(InputPartition partition) {
    return true;
  }

  @Override
  public PartitionReader<InternalRow> createReader(InputPartition partition) {
    throw new UnsupportedOperationException("rows are not supported; use createColumnarReader");
  }

  @Override
  public PartitionReader<ColumnarBatch> createColumnarReader(InputPartition partition) {
    return new ColumnsReader(pieces.createReader(partition), wanted, layout);
  }
}
