package ringlog.spark;

import java.util.HashMap;
import java.util.Map;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2;
import org.apache.spark.sql.sources.DataSourceRegister;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * The format "ringlog" where this jar is on Spark's class path: the Python source of that name, whose
 * records come as columns.
 *
 * <p>Everything is decided in Python, as without the jar: options, bounds, plan, gaps, where frames lie and
 * what is hidden of them. A task asks it for pieces (places of frames) in place of records, and this side
 * makes columns of the frames where they lie. Without it Spark copies every value of every column three
 * times on its way from Python to a row. What it does not know (views, tags, headers) goes the other way.
 */
public final class RinglogSource implements TableProvider, DataSourceRegister {
  private static final String NAME = "ringlog";

  /** One for the load: Python's plan is made once and kept with it, so that a DataFrame is a snapshot. */
  private PythonDataSourceV2 python;

  @Override
  public String shortName() {
    return NAME;
  }

  @Override
  public StructType inferSchema(CaseInsensitiveStringMap options) {
    return python().inferSchema(asked(options, null));
  }

  @Override
  public Table getTable(StructType schema, Transform[] partitioning, Map<String, String> properties) {
    CaseInsensitiveStringMap options = new CaseInsensitiveStringMap(properties);
    if (!isForPieces(options)) {
      return python().getTable(schema, partitioning, properties);
    }
    // What is written, and what the table is called, is the other one's affair.
    PythonDataSourceV2 other = named();
    Table described = python().getTable(Pieces.SCHEMA, partitioning, properties);
    return new RinglogTable(other.getTable(schema, partitioning, properties), described, schema);
  }

  @Override
  public boolean supportsExternalMetadata() {
    return true;
  }

  /** Options as Python is to see them: with the wish for pieces, where they can be had. */
  static CaseInsensitiveStringMap asked(CaseInsensitiveStringMap options, StructType schema) {
    if (!isForPieces(options)) {
      return options;
    }
    Map<String, String> all = new HashMap<>(options.asCaseSensitiveMap());
    all.put(Pieces.WISH, schema == null ? "" : schema.json());
    return new CaseInsensitiveStringMap(all);
  }

  private static boolean isForPieces(CaseInsensitiveStringMap options) {
    boolean isPlain = options.getOrDefault("view", "records").equalsIgnoreCase("records");
    return isPlain
        && options.getOrDefault("reader", "jvm").equalsIgnoreCase("jvm")
        && !options.containsKey("tags")
        && !options.getOrDefault("includeHeaders", "false").equalsIgnoreCase("true");
  }

  private PythonDataSourceV2 python() {
    if (python == null) {
      python = named();
    }
    return python;
  }

  private static PythonDataSourceV2 named() {
    PythonDataSourceV2 made = new PythonDataSourceV2();
    made.setShortName(NAME);
    return made;
  }
}
