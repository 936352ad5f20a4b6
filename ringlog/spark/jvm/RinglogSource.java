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
 * The data source "ringlog" if this jar is on Spark's class path. It wraps the Python source of the same
 * name and returns its records as columns.
 *
 * <p>As without the jar, Python decides everything: options, bounds, plan, gaps, the location of frames and
 * which records are hidden. A task requests pieces (locations of frames) from Python instead of records,
 * and this code decodes the frames into columns. Without it Spark copies every value of every column three
 * times between Python and a row.
 *
 * <p>Reads of views, by tags, with headers or with reader=python use the Python source alone.
 */
public final class RinglogSource implements TableProvider, DataSourceRegister {
  private static final String NAME = "ringlog";

  /** One instance per load. It keeps the plan that Python made, so a DataFrame is a snapshot. */
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
    // `described` has the schema of pieces. A second instance provides name, columns and writes of the table.
    PythonDataSourceV2 other = named();
    Table described = python().getTable(Pieces.SCHEMA, partitioning, properties);
    return new RinglogTable(other.getTable(schema, partitioning, properties), described, schema);
  }

  @Override
  public boolean supportsExternalMetadata() {
    return true;
  }

  /** Return the options for Python. They request pieces if this read supports pieces. */
  static CaseInsensitiveStringMap asked(CaseInsensitiveStringMap options, StructType schema) {
    if (!isForPieces(options)) {
      return options;
    }
    Map<String, String> all = new HashMap<>(options.asCaseSensitiveMap());
    all.put(Pieces.WISH, schema == null ? "" : schema.json());
    return new CaseInsensitiveStringMap(all);
  }

  /**
   * Return whether this read supports pieces. Only values that certainly select such a read do; Python
   * parses all others, also the invalid ones.
   */
  private static boolean isForPieces(CaseInsensitiveStringMap options) {
    return is(options, "view", "records")
        && is(options, "reader", "jvm")
        && is(options, "includeHeaders", "false", "0", "no")
        && !options.containsKey("tags");
  }

  /** Return whether the option is not set or has one of these values, which Python accepts in any case. */
  private static boolean is(CaseInsensitiveStringMap options, String name, String... values) {
    String found = options.get(name);
    if (found == null) {
      return true;
    }
    for (String value : values) {
      if (found.strip().equalsIgnoreCase(value)) {
        return true;
      }
    }
    return false;
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
